"""Ragged batches of random NumPy arrays, in which all that belongs to no sequence is poisoned with NaN."""

import ml_dtypes
import numpy as np


def converted(numbers, dtype):
    """Numbers in a dtype of NumPy or ml_dtypes; NaN stays NaN."""
    with np.errstate(invalid="ignore"):
        return np.asarray(numbers).astype(getattr(ml_dtypes, str(dtype), dtype))


def batch(
    sequences, *, heads=(8, 2), d=64, page_size=16, dtype="float32", spare_slots=1, spare_rows=2, table_slack=1, seed=0
):
    """Operands of paged_attention for `sequences`, a list of (new tokens, keys).

    Unused slots of pages, unused pages and padding rows of the query are NaN. Lengths and starts of unused sequences
    and unused table entries are out of range. Pages are shuffled.
    """
    arguments = {"heads": heads, "d": d, "dtype": dtype, "rows_after": spare_rows, "seed": seed}
    (query, cache, _, starts, _), own = varlen(sequences, pages=page_size, kv_layout="interleaved", **arguments)
    slots, pages = own["block_table"].shape
    shape = slots + spare_slots, pages - 1 + table_slack
    tables = np.random.default_rng(seed + 7).integers(-(2**31), 2**31, shape).astype(np.int32)
    tables[:slots, : pages - 1] = own["block_table"][:, :-1]
    lens = np.pad(own["seqused_k"], (0, spare_slots), constant_values=2**31 - 1)
    starts = np.pad(starts, (0, spare_slots), constant_values=-7)
    return query, cache, lens, tables, starts, np.int32([len(sequences)])


def varlen(
    sequences,
    *,
    heads=(8, 2),
    d=64,
    dv=None,
    dtype="float32",
    kv_dtype=None,
    pages=None,
    kv_layout=None,
    unused=(0, 0),
    rows_after=2,
    seed=0,
):
    """Operands and options of flash_attn_varlen for `sequences`, a list of (queries, keys).

    Parameters
    ----------
    sequences : list of (int, int)
        Queries and keys of each sequence.
    dv : int, optional
        Head dimension of the values; that of the keys by default.
    pages : int, optional
        Tokens per page; None for packed keys.
    kv_layout : str, optional
        The layout of K and V in one buffer.
    unused : (int, int)
        Rows of q, and of packed keys, after those of each sequence, which seqused_q and seqused_k exclude.

    Unused rows, slots and pages are NaN; unused table entries are out of range. Pages are shuffled.
    """
    rng = np.random.default_rng(seed)
    q_heads, kv_heads = heads
    dv = d if dv is None else dv
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    lens_q, lens_k = ([s[i] for s in sequences] for i in (0, 1))
    starts_q = np.cumsum([0, *(n + unused[0] for n in lens_q)])
    q = np.full((int(starts_q[-1]) + rows_after, q_heads, d), np.nan, np.float32)
    for start, n in zip(starts_q, lens_q, strict=False):
        q[start : start + n] = rng.standard_normal((n, q_heads, d))
    keys = [rng.standard_normal((n, kv_heads, d)) for n in lens_k]
    values = [rng.standard_normal((n, kv_heads, dv)) for n in lens_k]
    options = {}
    if unused[0]:
        options["seqused_q"] = np.int32(lens_q)
    if unused[1] or pages is not None:
        options["seqused_k"] = np.int32(lens_k)
    if pages is None:
        starts_k = np.cumsum([0, *(n + unused[1] for n in lens_k)])
        rows = int(starts_k[-1]) + rows_after
        k, v = np.full((rows, kv_heads, d), np.nan, np.float32), np.full((rows, kv_heads, dv), np.nan, np.float32)
        for b, start in enumerate(starts_k[:-1]):
            k[start : start + lens_k[b]], v[start : start + lens_k[b]] = keys[b], values[b]
    else:
        starts_k = None
        used = [-(-n // pages) for n in lens_k]
        count = sum(used) + 3
        k, v = np.full((count, pages, kv_heads, d), np.nan, np.float32), np.full((count, pages, kv_heads, dv), np.nan)
        table = rng.integers(-(2**31), 2**31, (len(sequences), max([*used, 0]) + 1)).astype(np.int32)
        free = rng.permutation(count).tolist()
        for b, n in enumerate(lens_k):
            for page in range(used[b]):
                table[b, page] = free.pop()
                here = slice(page * pages, min(n, (page + 1) * pages))
                k[table[b, page], : here.stop - here.start] = keys[b][here]
                v[table[b, page], : here.stop - here.start] = values[b][here]
        options["block_table"] = table
        if kv_layout is not None:
            options["kv_layout"] = kv_layout
            k, v = _one_buffer(k, v, kv_layout), None
    starts = [None if s is None else np.int32(s) for s in (starts_q, starts_k)]
    buffers = [None if x is None else converted(x, kv_dtype) for x in (k, v)]
    return (converted(q, dtype), *buffers, *starts), options


def _one_buffer(k, v, kv_layout):
    if kv_layout == "interleaved":
        both = np.stack([k, v], axis=3)  # [P, page_size, Hkv, 2, D]
        return both.reshape(*k.shape[:2], -1, k.shape[3])
    return np.stack([k, v], axis=0 if kv_layout == "stacked" else 1)


def step(sequences, *, cache=None, rows=None, k_scale=1.0, v_scale=1.0, **options):
    """Operands of paged_attention_update for `sequences`, a list of (new tokens, keys).

    The operands of `batch`, with its options, but with NaN in the slots of the new tokens, whose keys are the last
    ones; then `key`, `value` and `slot_mapping`. Padding rows are NaN and have slots outside the cache.

    Parameters
    ----------
    cache, rows : dtype, optional
        The dtypes of the cache and of the new rows; by default that of the queries.
    k_scale, v_scale : array or float
        The magnitude of the new rows, one number or one per head.
    """
    query, kv_cache, lens, tables, starts, count = batch(sequences, **options)
    rng = np.random.default_rng(options.get("seed", 0) + 1)
    numbers = kv_cache.astype(np.float32)
    page_size, heads, d = numbers.shape[1], numbers.shape[2] // 2, numbers.shape[3]
    slots = np.full(query.shape[0], -1, np.int32)
    slots[-1:] = numbers.shape[0] * page_size if options.get("spare_rows", 2) else -1
    for b, (new, keys) in enumerate(sequences):
        for i in range(max(0, new - keys), new):
            page, offset = divmod(keys - new + i, page_size)
            slots[int(starts[b]) + i] = int(tables[b, page]) * page_size + offset
    stored = (slots >= 0) & (slots < numbers.shape[0] * page_size)
    numbers.reshape(-1, 2 * heads, d)[slots[stored]] = np.nan
    key, value = (np.full((len(slots), heads, d), np.nan, np.float32) for _ in range(2))
    for new_rows, scale in ((key, k_scale), (value, v_scale)):
        new_rows[stored] = rng.standard_normal((stored.sum(), heads, d))
        new_rows[stored] *= np.asarray(scale, np.float32).reshape(1, -1, 1)
    new_rows = (converted(x, rows or query.dtype) for x in (key, value))
    kv_cache = converted(converted(numbers, query.dtype), cache or query.dtype)
    return query, kv_cache, lens, tables, starts, count, *new_rows, slots


def latent(sequences, *, heads=8, dims=(48, 32), page_size=16, dtype="float32", cache=None, spare_rows=2, seed=0):
    """Operands of mla_paged_attention for `sequences`, a list of (new tokens, keys).

    Unused slots of pages, unused pages and padding rows of the query are NaN. Unused table entries are out of range.

    Parameters
    ----------
    dims : (int, int)
        D and Dv.
    cache : dtype, optional
        That of the cache; by default that of the queries.
    """
    shape = {"heads": (heads, 1), "d": dims[0], "rows_after": spare_rows, "seed": seed}
    (q, k, _, starts, _), own = varlen(sequences, pages=page_size, dtype=dtype, **shape)
    return q, converted(k[:, :, 0], cache or dtype), starts, own["seqused_k"], own["block_table"]


def latent_step(sequences, *, dims=(48, 32), cache=None, rows=None, scale=1.0, **options):
    """Operands of mla_paged_attention_update for `sequences`, a list of (new tokens, keys).

    The operands of `latent`, with its options, but with NaN in the slots of the new tokens, whose keys are the last
    ones; then `c_kv`, `k_pe` and `slot_mapping`. Padding rows are NaN and have slots outside the cache.
    """
    q, kv_cache, starts, lens, table = latent(sequences, dims=dims, **options)
    rng = np.random.default_rng(options.get("seed", 0) + 1)
    numbers = kv_cache.astype(np.float32)
    page_size = numbers.shape[1]
    slots = np.full(q.shape[0], -1, np.int32)
    slots[-1:] = numbers.shape[0] * page_size if options.get("spare_rows", 2) else -1
    for b, (new, keys) in enumerate(sequences):
        for i in range(max(0, new - keys), new):
            page, offset = divmod(keys - new + i, page_size)
            slots[int(starts[b]) + i] = int(table[b, page]) * page_size + offset
    stored = (slots >= 0) & (slots < numbers.shape[0] * page_size)
    numbers.reshape(-1, dims[0])[slots[stored]] = np.nan
    new_rows = np.full((len(slots), dims[0]), np.nan, np.float32)
    new_rows[stored] = scale * rng.standard_normal((stored.sum(), dims[0]))
    new_rows = converted(new_rows, rows or q.dtype)
    kv_cache = converted(converted(numbers, q.dtype), cache or q.dtype)
    return q, kv_cache, starts, lens, table, new_rows[:, : dims[1]], new_rows[:, dims[1] :], slots
