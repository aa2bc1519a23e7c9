"""Variable-length flash attention in torch: over packed sequences, compiled, and over pages as vLLM calls it.

python examples/torch_flash_attn_varlen.py [cpu | cuda | xla]
"""

import sys

import torch

import xla_attention.torch  # noqa: F401  defines the operator


def main(device: str = "cpu") -> None:
    """Run three calls that compute the same attention."""
    if device == "xla":
        import torch_xla  # noqa: F401  defines the device

    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.float16
    seqlen, num_heads, num_heads_k, head_size, page_size = 40, 8, 2, 64, 16
    q = torch.randn(2 * seqlen, num_heads, head_size, dtype=dtype).to(device)
    k, v = (torch.randn(2 * seqlen, num_heads_k, head_size, dtype=dtype).to(device) for _ in range(2))
    cu_seqlens_q = torch.tensor([0, seqlen, 2 * seqlen], dtype=torch.int32).to(device)
    cu_seqlens_k, softmax_scale = cu_seqlens_q, head_size**-0.5
    options = {"is_causal": True, "window_left": -1, "window_right": -1, "softcap": 0.0}

    out, softmax_lse = torch.ops.xla.flash_attn_varlen_op(
        q, k, v,
        cu_seqlens_q, cu_seqlens_k,
        seqlen, seqlen,
        softmax_scale,
        **options,
        seqused_k=None,
        block_table=None,
    )  # fmt: skip
    print("packed:", tuple(out.shape), tuple(softmax_lse.shape))

    @torch.compile(backend="openxla" if device == "xla" else "inductor")
    def flash_attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple:
        scale = 1.0 / (q.shape[-1] ** 0.5)
        return torch.ops.xla.flash_attn_varlen_op(q, k, v, cu_seqlens, cu_seqlens, seqlen, seqlen, scale, **options)

    compiled, _ = flash_attention_forward(q, k, v, cu_seqlens_q)
    print("compiled agrees:", torch.allclose(compiled.cpu(), out.cpu(), atol=1e-3))

    # The same keys in a cache with three pages per sequence, of which the last is not full.
    pages = -(-seqlen // page_size)
    padded = torch.nn.functional.pad
    rows = pages * page_size - seqlen

    def paged(x: torch.Tensor) -> torch.Tensor:
        by_sequence = padded(x.reshape(2, seqlen, num_heads_k, head_size), (0, 0, 0, 0, 0, rows))
        return by_sequence.reshape(2 * pages, page_size, num_heads_k, head_size)

    seq_lens = torch.tensor([seqlen, seqlen], dtype=torch.int32).to(device)
    block_tables = torch.arange(2 * pages, dtype=torch.int32).reshape(2, pages).to(device)
    dummy_cu_seqlens_k = torch.zeros(3, dtype=torch.int32).to(device)
    over_pages, _ = torch.ops.xla.flash_attn_varlen_op(
        q, paged(k), paged(v),
        cu_seqlens_q,
        dummy_cu_seqlens_k,  # not read, because seqused_k has the lengths
        seqlen,
        seqlen,
        softmax_scale,
        **options,
        seqused_k=seq_lens,
        block_table=block_tables,
    )  # fmt: skip
    print("over pages agrees:", torch.allclose(over_pages.cpu(), out.cpu(), atol=1e-3))


if __name__ == "__main__":
    main(*sys.argv[1:])
