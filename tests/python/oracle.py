"""What the operators mean (SPEC 2.1, 2.3, 2.4), in NumPy and float64, and how close to it a kernel has to be.

Shares no code with the package. Arrays may be NumPy's or JAX's; results are NumPy float64 unless said otherwise.
"""

from typing import NamedTuple

import numpy as np


class Sequence(NamedTuple):
    """One sequence of a ragged batch, its metadata clamped."""

    index: int
    rows: slice  # of the packed queries
    len_q: int
    len_k: int


def sequences(total_rows, capacity, context_lens, query_start_loc, num_seqs):
    """The sequences in use: no count, start or length is trusted."""
    starts = np.asarray(query_start_loc, np.int64)
    lengths = np.asarray(context_lens, np.int64)
    used = int(np.clip(int(np.asarray(num_seqs).reshape(())), 0, len(lengths)))
    for index in range(used):
        start = int(np.clip(starts[index], 0, total_rows))
        end = int(np.clip(starts[index + 1], start, total_rows))
        yield Sequence(index, slice(start, end), end - start, int(np.clip(lengths[index], 0, capacity)))


def visible(len_q, len_k, window_left=-1, window_right=-1):
    """`bool[len_q, len_k]`: which keys a query sees; the last query stands at the last key, -1 is unlimited."""
    position = np.arange(len_q)[:, None] + len_k - len_q
    key = np.arange(len_k)[None, :]
    seen = np.ones((len_q, len_k), bool)
    if window_left >= 0:
        seen &= key >= position - window_left
    if window_right >= 0:
        seen &= key <= position + window_right
    return seen


def attend(q, k, v, seen, *, scale, softcap=0.0):
    """One head of one sequence, exactly: `q [n, D]`, `k [m, D]`, `v [m, Dv]`, `seen [n, m]` to `out`, `lse`.

    Keys that no query sees are not looked at: they may hold anything.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    used = seen.any(axis=0)
    rows = seen.any(axis=1)
    if not rows.any():
        return out, lse
    scores = float(scale) * (q[rows] @ k[used].T)
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen[rows][:, used], scores, -np.inf)
    largest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - largest)
    denominator = weights.sum(axis=1, keepdims=True)
    out[rows] = (weights / denominator) @ v[used]
    lse[rows] = (largest + np.log(denominator))[:, 0]
    return out, lse


def attend_naively(q, k, v, seen, *, scale, softcap=0.0):
    """The same formula in the operands' own dtype: products in float32, S and P rounded, softmax in float32."""
    dtype = q.dtype

    def rounded(x):
        return x.astype(dtype).astype(np.float32)

    q, k, v = (np.asarray(x).astype(np.float32) for x in (q, k, v))
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    used = seen.any(axis=0)
    rows = seen.any(axis=1)
    if not rows.any():
        return out, lse
    scores = rounded(np.float32(scale) * rounded(q[rows] @ k[used].T))
    if softcap > 0:
        cap = np.float32(softcap)
        scores = rounded(cap * rounded(np.tanh(scores / cap)))
    scores = np.where(seen[rows][:, used], scores, np.float32(-np.inf))
    largest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - largest)
    denominator = weights.sum(axis=1, keepdims=True)
    out[rows] = rounded(rounded(weights / denominator) @ v[used])
    lse[rows] = (largest + np.log(denominator))[:, 0]
    return out, lse


def paged_attention_reference(
    query,
    kv_cache,
    context_lens,
    block_tables,
    query_start_loc,
    num_seqs,
    *,
    scale,
    sliding_window=None,
    soft_cap=None,
    head=attend,
):
    """`out [T, Hq, D]` and `lse [Hq, T]` of `paged_attention`.

    A row of no sequence, or that sees no key, has out 0 and lse -inf. `head` computes one head of one sequence.
    """
    query, kv_cache, block_tables = np.asarray(query), np.asarray(kv_cache), np.asarray(block_tables)
    total_rows, q_heads, head_dim = query.shape
    num_pages, page_size, both_heads, _ = kv_cache.shape
    group = q_heads // (both_heads // 2)
    capacity = block_tables.shape[1] * page_size if num_pages else 0
    window_left = -1 if sliding_window is None else sliding_window - 1
    out, lse = np.zeros((total_rows, q_heads, head_dim)), np.full((q_heads, total_rows), -np.inf)
    for sequence in sequences(total_rows, capacity, context_lens, query_start_loc, num_seqs):
        used_entries = -(-sequence.len_k // page_size) if page_size else 0
        pages = np.clip(block_tables[sequence.index, :used_entries].astype(np.int64), 0, max(num_pages - 1, 0))
        stored = kv_cache[pages].reshape(-1, both_heads, head_dim)[: sequence.len_k]
        seen = visible(sequence.len_q, sequence.len_k, window_left, 0)
        for h in range(q_heads):
            kv_head = h // group
            out[sequence.rows, h], lse[h, sequence.rows] = head(
                query[sequence.rows, h],
                stored[:, 2 * kv_head],
                stored[:, 2 * kv_head + 1],
                seen,
                scale=np.float32(scale),
                softcap=np.float32(soft_cap or 0),
            )
    return out, lse


def paged_attention_naive(*operands, **options):
    """:func:`paged_attention_reference` in the dtype of the query: the measure of what a kernel may be off by."""
    return paged_attention_reference(*operands, **options, head=attend_naively)


def kv_cache_update_reference(kv_cache, key, value, slot_mapping, *, kv_layout=1, k_scale=None, v_scale=None):
    """The cache after the update, in its own dtype; of equal slots the last row stays.

    `kv_layout`: 1 `[P, page_size, 2*Hkv, D]`, 2 `[2, P, page_size, Hkv, D]`, 3 `[P, 2, page_size, Hkv, D]`.
    """
    cache = np.array(kv_cache)
    if kv_layout == 1:
        k, v = cache[:, :, 0::2], cache[:, :, 1::2]
    elif kv_layout == 2:
        k, v = cache[0], cache[1]
    else:
        k, v = cache[:, 0], cache[:, 1]
    _write_rows(k, key, slot_mapping, k_scale)
    _write_rows(v, value, slot_mapping, v_scale)
    return cache


def kv_cache_update_split_reference(k_cache, v_cache, key, value, slot_mapping, *, k_scale=None, v_scale=None):
    """Both caches after the update, `[P, page_size, Hkv, D]` and `[P, page_size, Hkv, Dv]`."""
    k, v = np.array(k_cache), np.array(v_cache)
    _write_rows(k, key, slot_mapping, k_scale)
    _write_rows(v, value, slot_mapping, v_scale)
    return k, v


def _write_rows(cache, rows, slot_mapping, scale):
    """Row t of `[T, Hkv, D]` to its slot of `[P, page_size, Hkv, D]`; slots outside are skipped, never clamped."""
    num_pages, page_size = cache.shape[:2]
    rows = np.asarray(rows)
    if scale is not None:
        per_head = np.asarray(scale, np.float64).reshape(1, -1, 1)
        rows = (rows.astype(np.float64) / per_head).astype(cache.dtype)
    for row, slot in zip(rows, np.asarray(slot_mapping).tolist(), strict=True):
        if 0 <= slot < num_pages * page_size:
            cache[slot // page_size, slot % page_size] = row


def assert_close_like_naive(actual, exact, naive, *, factor=2.0, floor=1e-5, name="out"):
    """`max|actual - exact| <= factor * max|naive - exact| + floor * max(1, max|exact|)`, and no NaN."""
    actual, exact, naive = (np.asarray(x).astype(np.float64) for x in (actual, exact, naive))
    assert actual.shape == exact.shape == naive.shape, f"{name}: {actual.shape}, {exact.shape}, {naive.shape}"
    assert np.isfinite(exact).all(), f"{name}: the reference is not finite"
    assert np.isfinite(actual).all(), f"{name} is not finite at {np.argwhere(~np.isfinite(actual))[:5].tolist()}"
    if exact.size == 0:
        return
    allowed = factor * np.abs(naive - exact).max() + floor * max(1.0, np.abs(exact).max())
    off = np.abs(actual - exact)
    worst = np.unravel_index(off.argmax(), off.shape)
    assert off[worst] <= allowed, (
        f"{name}{[int(i) for i in worst]} is {actual[worst]}, expected {exact[worst]} within {allowed:.3g}"
    )


def assert_lse_close(actual, exact, *, soft_cap_in_16_bit=False):
    """-inf exactly where the reference has it, else within `1e-4 * max(1, |lse|)`; 2e-2 for a 16-bit soft cap."""
    actual, exact = (np.asarray(x).astype(np.float64) for x in (actual, exact))
    assert actual.shape == exact.shape, f"lse: {actual.shape}, {exact.shape}"
    empty = np.isneginf(exact)
    np.testing.assert_array_equal(np.isneginf(actual), empty, err_msg="lse: rows that see no key")
    tolerance = 2e-2 if soft_cap_in_16_bit else 1e-4
    off = np.abs(actual[~empty] - exact[~empty]) / np.maximum(1.0, np.abs(exact[~empty]))
    assert (off <= tolerance).all(), f"lse is off by {off.max():.3g}, allowed {tolerance}"


def assert_paged_attention(out, lse, *operands, scale, sliding_window=None, soft_cap=None):
    """`out [T, Hq, D]`, and `lse [Hq, T]` unless None, are what SPEC 2.1 allows for these operands."""
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    exact, exact_lse = paged_attention_reference(*operands, **options)
    naive, _ = paged_attention_naive(*operands, **options)
    assert_close_like_naive(out, exact, naive)
    no_key = np.isneginf(exact_lse).T
    assert (np.asarray(out)[no_key] == 0).all(), "a row that sees no key is not 0"
    if lse is not None:
        sixteen_bit = np.asarray(operands[0]).dtype.itemsize == 2
        assert_lse_close(lse, exact_lse, soft_cap_in_16_bit=bool(soft_cap) and sixteen_bit)
