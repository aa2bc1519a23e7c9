"""What the operators mean (SPEC 2.1, 2.3, 2.4), in NumPy and float64, and how close to it a kernel has to be.

Shares no code with the package. Arrays may be NumPy's or JAX's; results are NumPy float64 unless said otherwise.
"""

import functools
from typing import NamedTuple

import ml_dtypes
import numpy as np


class Sequence(NamedTuple):
    """One sequence of a ragged batch, its metadata clamped."""

    index: int
    rows: slice  # of the packed queries
    len_q: int
    len_k: int


class Score(NamedTuple):
    """From q . k to a weight, for one head of one sequence."""

    scale: float  # softmax_scale * q_scale * k_scale
    softcap: float = 0.0
    slope: float = 0.0
    sink: float = -np.inf
    v_scale: float = 1.0


def clamped_rows(starts, index, total):
    """Rows `start` to `end` of sequence `index`: `starts` are read as their running maximum, within `[0, total]`."""
    start, end = np.maximum.accumulate(np.clip(starts[: index + 2], 0, total))[-2:]
    return int(start), int(end)


def positions(len_q, len_k, top_left=False):
    """`int[len_q]`: the key at which each query stands; the last query at the last key, or query 0 at key 0."""
    return np.arange(len_q) + (0 if top_left else len_k - len_q)


def visible(len_q, len_k, window_left=-1, window_right=-1, *, top_left=False, leftpad=0):
    """`bool[len_q, len_k]`: which keys a query sees; -1 is unlimited."""
    position = positions(len_q, len_k, top_left)[:, None]
    key = np.arange(len_k)[None, :]
    seen = np.broadcast_to(key >= leftpad, (len_q, len_k)).copy()
    if window_left >= 0:
        seen &= key >= position - window_left
    if window_right >= 0:
        seen &= key <= position + window_right
    return seen


def attend(q, k, v, seen, score, position, dtype=None):
    """One head of one sequence: `q [n, D]`, `k [m, D]`, `v [m, Dv]`, `seen [n, m]` to `out`, `lse`.

    Exactly, or for a `dtype` as the naive formula has it: products in float32, S and P rounded to the dtype, softmax in
    float32. Keys that no query sees are not looked at: they may hold anything.
    """
    number = np.float64 if dtype is None else np.float32

    def rounded(x):
        return x if dtype is None else x.astype(dtype).astype(number)

    q, k, v = (np.asarray(x).astype(number) for x in (q, k, v))
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), np.float64(score.sink))
    used, rows = seen.any(axis=0), seen.any(axis=1)
    if not rows.any():
        return out, lse
    logits = rounded(number(score.scale) * rounded(q[rows] @ k[used].T))
    if score.softcap > 0:
        cap = number(score.softcap)
        logits = rounded(cap * rounded(np.tanh(logits / cap)))
    if score.slope:
        distance = np.abs(position[rows, None] - np.flatnonzero(used)[None, :]).astype(number)
        logits = rounded(logits - number(score.slope) * distance)
    logits = np.where(seen[rows][:, used], logits, number(-np.inf))
    sink = number(score.sink)
    largest = np.maximum(logits.max(axis=1, keepdims=True), sink)
    weights = np.exp(logits - largest)
    denominator = weights.sum(axis=1, keepdims=True) + np.exp(sink - largest)
    out[rows] = rounded(number(score.v_scale) * (rounded(weights / denominator) @ v[used]))
    lse[rows] = (largest + np.log(denominator))[:, 0]
    return out, lse


def _per_head(values, head, otherwise):
    """Element `head` of one value or one a head."""
    if values is None:
        return otherwise
    values = np.asarray(values, np.float64).reshape(-1)
    return float(values[head % len(values)])


def _attention(q, group, sequences, keys, *, score_of, seen_of, value_dim, top_left=False, head=attend):
    """`out [T, Hq, Dv]` and `lse [Hq, T]`; `keys(sequence)` gives its K and V, `[len_k, Hkv, D]` each."""
    rows, q_heads = q.shape[:2]
    out, lse = np.zeros((rows, q_heads, value_dim)), np.full((q_heads, rows), -np.inf)
    for sequence in sequences:
        k, v = keys(sequence)
        position = positions(sequence.len_q, sequence.len_k, top_left)
        seen = seen_of(sequence)
        for h in range(q_heads):
            out[sequence.rows, h], lse[h, sequence.rows] = head(
                q[sequence.rows, h], k[:, h // group], v[:, h // group], seen, score_of(sequence, h), position
            )
    return out, lse


def _score(softmax_scale, softcap, alibi_slopes, sinks, q_scale, k_scale, v_scale, group):
    """Which `Score` a head of a sequence has."""

    def of(sequence, h):
        slopes = None if alibi_slopes is None else np.asarray(alibi_slopes)
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[sequence.index]
        scales = _per_head(q_scale, h // group, 1.0) * _per_head(k_scale, h // group, 1.0)
        return Score(
            float(np.float32(softmax_scale)) * scales,
            float(np.float32(softcap or 0)),
            0.0 if slopes is None else float(slopes[h]),
            -np.inf if sinks is None else float(np.asarray(sinks)[h]),
            _per_head(v_scale, h // group, 1.0),
        )

    return of


def _paged_rows(cache, table, sequence):
    """The stored rows of a sequence from `[P, page_size, ...]`; page ids are clamped."""
    num_pages, page_size = cache.shape[:2]
    used_entries = -(-sequence.len_k // page_size) if page_size else 0
    pages = np.clip(table[sequence.index, :used_entries].astype(np.int64), 0, max(num_pages - 1, 0))
    return cache[pages].reshape(-1, *cache.shape[2:])[: sequence.len_k]


def _capacity(cache, table):
    return table.shape[1] * cache.shape[1] if cache.shape[0] else 0


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
    alibi_slopes=None,
    sinks=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    head=attend,
):
    """`out [T, Hq, D]` and `lse [Hq, T]` of `paged_attention`. `head` computes one head of one sequence."""
    query, kv_cache, block_tables = np.asarray(query), np.asarray(kv_cache), np.asarray(block_tables)
    starts, lengths = np.asarray(query_start_loc, np.int64), np.asarray(context_lens, np.int64)
    group = query.shape[1] // (kv_cache.shape[2] // 2)
    window_left = -1 if sliding_window is None else sliding_window - 1
    used = int(np.clip(int(np.asarray(num_seqs).reshape(())), 0, len(lengths)))

    def sequence(b):
        start, end = clamped_rows(starts, b, len(query))
        len_k = int(np.clip(lengths[b], 0, _capacity(kv_cache, block_tables)))
        return Sequence(b, slice(start, end), end - start, len_k)

    def keys(sequence):
        stored = _paged_rows(kv_cache, block_tables, sequence)
        return stored[:, 0::2], stored[:, 1::2]

    return _attention(
        query,
        group,
        map(sequence, range(used)),
        keys,
        score_of=_score(scale, soft_cap, alibi_slopes, sinks, q_scale, k_scale, v_scale, group),
        seen_of=lambda s: visible(s.len_q, s.len_k, window_left, 0),
        value_dim=query.shape[2],
        head=head,
    )


def paged_attention_naive(*operands, **options):
    """:func:`paged_attention_reference` in the dtype of the query: the measure of what a kernel may be off by."""
    return paged_attention_reference(*operands, **options, head=_naively(operands[0]))


def split_layout(k, kv_layout):
    """K and V, `[P, page_size, Hkv, D]` each, of one buffer."""
    if kv_layout == "interleaved":
        return k[:, :, 0::2], k[:, :, 1::2]
    return (k[0], k[1]) if kv_layout == "stacked" else (k[:, 0], k[:, 1])


def flash_attn_varlen_reference(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    softmax_scale=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    seqused_q=None,
    seqused_k=None,
    block_table=None,
    kv_layout=None,
    leftpad_k=None,
    alibi_slopes=None,
    sinks=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    top_left=False,
    head=attend,
):
    """`out [Tq, Hq, Dv]` and `lse [Hq, Tq]` of `flash_attn_varlen`. `head` computes one head of one sequence."""
    q, k = np.asarray(q), np.asarray(k)
    k, v = (k, np.asarray(v)) if kv_layout is None else split_layout(k, kv_layout)
    table = None if block_table is None else np.asarray(block_table)
    starts_q = np.asarray(cu_seqlens_q, np.int64)
    starts_k = starts_q if cu_seqlens_k is None else np.asarray(cu_seqlens_k, np.int64)
    group = q.shape[1] // k.shape[-2]
    left, right = window[0], 0 if causal else window[1]

    def key_slot(b):
        """First row and number of rows of the packed keys."""
        start, end = clamped_rows(starts_k, b, len(k))
        return start, end - start

    def sequence(b):
        start, end = clamped_rows(starts_q, b, len(q))
        len_q = end - start if seqused_q is None else min(end - start, max(int(seqused_q[b]), 0))
        capacity = key_slot(b)[1] if table is None else _capacity(k, table)
        given = capacity if table is None else int(starts_k[b + 1]) - int(starts_k[b])
        len_k = int(np.clip(given if seqused_k is None else int(seqused_k[b]), 0, capacity))
        return Sequence(b, slice(start, start + len_q), len_q, len_k)

    def keys(sequence):
        if table is not None:
            return _paged_rows(k, table, sequence), _paged_rows(v, table, sequence)
        start = key_slot(sequence.index)[0]
        return k[start : start + sequence.len_k], v[start : start + sequence.len_k]

    def seen(sequence):
        leftpad = 0 if leftpad_k is None else int(np.clip(int(leftpad_k[sequence.index]), 0, sequence.len_k))
        return visible(sequence.len_q, sequence.len_k, left, right, top_left=top_left, leftpad=leftpad)

    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _attention(
        q,
        group,
        map(sequence, range(len(starts_q) - 1)),
        keys,
        score_of=_score(scale, softcap, alibi_slopes, sinks, q_scale, k_scale, v_scale, group),
        seen_of=seen,
        value_dim=v.shape[-1],
        top_left=top_left,
        head=head,
    )


def flash_attn_varlen_naive(*operands, **options):
    """:func:`flash_attn_varlen_reference` in the dtype of the query: the measure of what a kernel may be off by."""
    return flash_attn_varlen_reference(*operands, **options, head=_naively(operands[0]))


def _naively(query):
    """The naive head in the dtype that products of these queries are taken in: bf16 for 8 bit."""
    dtype = np.asarray(query).dtype
    dtype = np.dtype(ml_dtypes.bfloat16) if dtype.itemsize == 1 else dtype
    return functools.partial(attend, dtype=dtype)


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
    rows = _stored(np.asarray(rows), scale, cache.dtype)
    for row, slot in zip(rows, np.asarray(slot_mapping).tolist(), strict=True):
        if 0 <= slot < num_pages * page_size:
            cache[slot // page_size, slot % page_size] = row


def gather_kv_cache_reference(
    kv_cache, block_tables, context_lens, capacity, *, kv_layout=None, dtype=None, k_scale=None, v_scale=None
):
    """Keys and values `[capacity, Hkv, D]`, and where the rows of each sequence begin; K and V apart with no layout."""
    sides = kv_cache if kv_layout is None else split_layout(kv_cache, kv_layout)
    pages, page_size = sides[0].shape[:2]
    if dtype is None:
        dtype = ml_dtypes.bfloat16 if sides[0].dtype.itemsize == 1 else sides[0].dtype
    lens = np.clip(context_lens, 0, block_tables.shape[1] * page_size if pages else 0)
    rows = [(block_tables[b, j // page_size], j % page_size) for b, n in enumerate(lens) for j in range(n)][:capacity]
    found = []
    for side, scale in zip(sides, (k_scale, v_scale), strict=True):
        out = np.zeros((capacity, *side.shape[2:]), dtype)
        for i, (page, token) in enumerate(rows):
            row = side[np.clip(page, 0, pages - 1), token]
            out[i] = row if scale is None else row.astype(np.float32) * np.reshape(np.float32(scale), (-1, 1))
        found.append(out)
    return *found, np.minimum(np.cumsum([0, *lens.astype(np.int64)]), capacity).astype(np.int32)


def _stored(rows, scale, dtype):
    """What a cache of `dtype` holds of rows `[T, Hkv, D]`: the float32 quotient, rounded; fp8 saturates."""
    if scale is not None:
        rows = (rows.astype(np.float64) / np.asarray(scale, np.float32).reshape(1, -1, 1)).astype(np.float32)
    if dtype.itemsize == 1:
        largest = float(ml_dtypes.finfo(dtype).max)
        rows = np.clip(rows.astype(np.float32), -largest, largest)
    return rows.astype(dtype)


def rotated(rows, positions, cos_sin, interleaved=False):
    """Rows `[T, heads, D]`, the first `rot` elements of each head turned by the row of `[max_pos, rot]` of its token.

    A pair is elements i and i + rot/2, interleaved 2i and 2i + 1. Positions are clamped to the table; without a row of
    it nothing turns.
    """
    out, table = np.array(rows, np.float64), np.asarray(cos_sin, np.float64)
    max_pos, rot = table.shape
    if max_pos == 0:
        return out
    angles = table[np.clip(np.asarray(positions, np.int64), 0, max_pos - 1)][:, None]
    cos, sin = angles[..., : rot // 2], angles[..., rot // 2 :]
    pair = (
        (np.s_[..., 0:rot:2], np.s_[..., 1:rot:2])
        if interleaved
        else (np.s_[..., : rot // 2], np.s_[..., rot // 2 : rot])
    )
    a, b = out[pair[0]].copy(), out[pair[1]].copy()
    out[pair[0]], out[pair[1]] = a * cos - b * sin, b * cos + a * sin
    return out


def merge_attention_states_reference(out_a, lse_a, out_b, lse_b):
    """`out [n, h, d]` and `lse [h, n]` of both parts; a part whose lse is not finite is empty and not looked at."""
    parts = []
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        lse = np.asarray(lse, np.float64)
        there = np.isfinite(lse)
        out = np.where(there.T[..., None], np.asarray(out).astype(np.float64), 0)
        parts.append((out, np.where(there, lse, -np.inf)))
    (out_a, lse_a), (out_b, lse_b) = parts
    lse = np.logaddexp(lse_a, lse_b)
    with np.errstate(invalid="ignore"):
        weights = [np.nan_to_num(np.exp(part - lse)).T[..., None] for part in (lse_a, lse_b)]
    return weights[0] * out_a + weights[1] * out_b, lse


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


def assert_paged_attention(out, lse, *operands, **options):
    """`out [T, Hq, D]`, and `lse [Hq, T]` unless None, are what SPEC 2.1 allows for these operands."""
    exact, naive = paged_attention_reference(*operands, **options), paged_attention_naive(*operands, **options)
    _assert_attention(out, lse, exact, naive, operands[0], soft_cap=options.get("soft_cap"))


def assert_flash_attn_varlen(out, lse, *operands, **options):
    """`out [Tq, Hq, Dv]`, and `lse [Hq, Tq]` unless None, are what SPEC 2.1 allows for these operands."""
    exact, naive = flash_attn_varlen_reference(*operands, **options), flash_attn_varlen_naive(*operands, **options)
    _assert_attention(out, lse, exact, naive, operands[0], soft_cap=options.get("softcap"))


def _assert_attention(out, lse, exact, naive, query, *, soft_cap):
    assert_close_like_naive(out, exact[0], naive[0])
    no_key = np.isneginf(exact[1]).T
    assert (np.asarray(out)[no_key] == 0).all(), "a row that sees no key is not 0"
    if lse is not None:
        assert_lse_close(lse, exact[1], soft_cap_in_16_bit=bool(soft_cap) and np.asarray(query).dtype.itemsize < 4)
