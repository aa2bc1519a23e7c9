"""Rotary position embedding of a dense batch, with the arithmetic of flash-attn's kernels."""

import torch


def rotated(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """The tensor ``[B, S, H, D]`` rotated by the rows ``positions [B, S]`` of the tables ``[S_ro, rotary_dim / 2]``.

    Products and sums are f32, and the result is rounded once. Positions past the tables count as the nearest row.
    Elements from `rotary_dim` on are unchanged.
    """
    positions = positions.clamp(0, cos.shape[0] - 1)
    cos, sin = (table[positions][:, :, None].float() for table in (cos, sin))
    half = cos.shape[-1]
    if interleaved:
        a, b = x[..., : 2 * half].float().unflatten(-1, (half, 2)).unbind(-1)
    else:
        a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)
