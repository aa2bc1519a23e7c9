"""Self-attention over packed sequences and its gradients, dense, in f64 NumPy."""

import itertools

import numpy as np


def visible_keys(cu_seqlens, seqused, total, *, causal, window):
    """``bool[T, T]``, whether a query attends to a key, and which rows of the stream are used."""
    rows = np.arange(total)
    sequence = np.full(total, -1)
    for b, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        sequence[start : end if seqused is None else min(end, start + seqused[b])] = b
    distance = rows[None] - rows[:, None]  # of the key from the query, positive where the key is later
    left, right = window
    visible = (sequence[:, None] == sequence[None]) & (sequence >= 0)[:, None]
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible & (distance <= 0) if causal else visible, sequence


def packed_attention(
    q, k, v, cu_seqlens, dout, dlse, *, seqused=None, causal=True, window=(-1, -1), softcap=0.0, sinks=None, slopes=None
):
    """``out, lse, dq, dk, dv``, and with sinks ``dsinks``; what is not used counts as 0."""
    visible, sequence = visible_keys(cu_seqlens, seqused, len(q), causal=causal, window=window)
    used = sequence >= 0
    q, k, v, dout = (np.where(used[:, None, None], np.float64(x), 0) for x in (q, k, v, dout))
    dlse = np.where(used, np.float64(dlse), 0)
    heads, kv_heads = q.shape[1], k.shape[1]
    k, v = (np.repeat(x, heads // kv_heads, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    tanh = np.tanh(scores / softcap) if softcap else np.zeros(())
    scores = softcap * tanh if softcap else scores
    if slopes is not None:
        rows = np.arange(len(q))
        slopes = np.broadcast_to(slopes, (len(cu_seqlens) - 1, heads))[sequence].T  # of each query
        scores = scores - slopes[:, :, None] * np.abs(rows[:, None] - rows[None])
    scores = np.where(visible, scores, -np.inf)
    sink = np.where(used, -np.inf if sinks is None else np.float64(sinks)[:, None], -np.inf)
    highest = np.maximum(np.maximum(scores.max(-1), sink), -1e300)
    weights, sink = np.exp(scores - highest[..., None]), np.exp(sink - highest)
    total = weights.sum(-1) + sink
    with np.errstate(divide="ignore"):
        lse = highest + np.log(total)
    total = np.where(total == 0, 1, total)
    weights, sink = weights / total[..., None], sink / total
    out = np.einsum("hij,jhd->ihd", weights, v)
    dlse = np.where(np.isneginf(lse), 0, dlse)
    delta = np.einsum("ihd,ihd->hi", dout, out) - dlse
    dscores = weights * (np.einsum("ihd,jhd->hij", dout, v) - delta[..., None]) * (1 - tanh**2) * scale
    dq = np.einsum("hij,jhd->ihd", dscores, k)
    dk, dv = np.einsum("hij,ihd->jhd", dscores, q), np.einsum("hij,ihd->jhd", weights, dout)
    dk, dv = (x.reshape(len(q), kv_heads, -1, x.shape[-1]).sum(2) for x in (dk, dv))
    results = out, lse, dq, dk, dv
    return results if sinks is None else (*results, -(sink * delta).sum(1))
