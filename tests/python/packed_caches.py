"""Batches of ragged_paged_attention_v3 in NumPy, and its results, computed token by token from the definition."""

import numpy as np

from batches import converted
from calls import Call

FP8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def align(number, multiple):
    return -(-number // multiple) * multiple


def packing(dtype):
    return 4 // converted(0, dtype).itemsize


def rows_of(cache, layout, page, offset, head, d):
    """Views of K and V of a token, one KV head."""
    token = cache[page, offset].reshape(-1, cache.shape[-1])
    if layout == "concatenated":
        return token[head, :d], token[head, d : 2 * d]
    return token[2 * head, :d], token[2 * head + 1, :d]


def packed_batch(
    sequences,
    *,
    heads=(8, 2),
    d=128,
    page_size=4,
    dtype="float32",
    cache="",
    layout="interleaved",
    spare_slots=2,
    spare_rows=3,
    ragged=False,
    seed=0,
):
    """Operands for `sequences`, a list of (new tokens, keys), by name.

    What belongs to no sequence is NaN, in the cache also the rows that the call stores. After the last end, cu_q_lens
    repeats 0, as from tpu-inference's callers; other padding is out of range. Pages are shuffled.

    Parameters
    ----------
    cache : dtype, optional
        That of the cache and of new keys and values; by default that of the queries.
    ragged : bool
        Whether page_indices has no gaps, and there are cu_kv_lens.
    """
    rng = np.random.default_rng(seed)
    (num_heads, kv_heads), cache_dtype = heads, cache or dtype
    used = [align(keys, page_size) // page_size for _, keys in sequences]
    num_pages, columns = sum(used) + 3, max(used) + 1
    word = packing(cache_dtype)
    rows, lanes = (kv_heads, 128) if layout == "concatenated" else (2 * kv_heads, align(d, 128))
    kv_cache = np.full((num_pages, page_size, align(rows, word) // word, word, lanes), np.nan, np.float32)
    pages = rng.permutation(num_pages)
    slots = len(sequences) + spare_slots
    table = rng.choice([-5, 2**31 - 1, num_pages], (slots, columns)).astype(np.int32)
    for b, count in enumerate(used):
        table[b, :count] = pages[sum(used[:b]) :][:count]
    for b, (new, keys) in enumerate(sequences):
        for token in range(keys - new):
            kv_cache[table[b, token // page_size], token % page_size] = rng.standard_normal(kv_cache.shape[2:])
    lens, new_lens = ([sequence[i] for sequence in sequences] for i in (1, 0))
    num_rows = sum(new_lens) + spare_rows
    shapes = {"queries": (num_rows, num_heads, d), "keys": (num_rows, kv_heads, d), "values": (num_rows, kv_heads, d)}
    arrays = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    for array in arrays.values():
        array[: sum(new_lens)] = rng.standard_normal((sum(new_lens), *array.shape[1:]))
    arrays = {name: converted(x, dtype if name == "queries" else cache_dtype) for name, x in arrays.items()}
    operands = {
        **arrays,
        "kv_cache": converted(kv_cache, cache_dtype),
        "kv_lens": np.int32([*lens, *[2**31 - 1] * spare_slots]),
        "page_indices": table.reshape(-1),
        "cu_q_lens": np.int32([*np.cumsum([0, *new_lens]), *[0] * spare_slots]),
        "distribution": np.int32([new_lens.count(1), new_lens.count(1), len(sequences)]),
    }
    if ragged:
        operands["page_indices"] = np.concatenate([table[b, :count] for b, count in enumerate(used)])
        operands["cu_kv_lens"] = np.int32([*np.cumsum([0, *used]) * page_size, *[-7] * spare_slots])
    return operands


def packed_calls():
    """ragged_paged_attention_v3 over each form of a packed cache, with the number of heads that two devices share."""
    forms = {
        "interleaved bf16": {"dtype": "bfloat16"},
        "interleaved f32": {},
        "interleaved fp8": {"dtype": "bfloat16", "cache": "float8_e4m3fn", "heads": (8, 4)},
        "interleaved bf16, padded": {"dtype": "bfloat16", "d": 80},
        "concatenated bf16": {"dtype": "bfloat16", "d": 64, "heads": (8, 4), "layout": "concatenated"},
        "concatenated f32": {"d": 64, "layout": "concatenated"},
        "interleaved e5m2, q_scale": {"dtype": "bfloat16", "cache": "float8_e5m2", "heads": (8, 4)},
    }
    for name, form in forms.items():
        arguments = packed_batch([(1, 9), (6, 6)], **form) | {"kv_layout": form.get("layout", "interleaved")}
        arguments |= {"q_scale": 0.5} if "q_scale" in name else {}
        yield Call("ragged_paged_attention_v3", name, arguments, "kv_cache")


def expected_results(
    queries,
    keys,
    values,
    kv_cache,
    kv_lens,
    page_indices,
    cu_q_lens,
    distribution,
    attention_sink=None,
    *,
    layout="interleaved",
    cu_kv_lens=None,
    use_causal_mask=True,
    update_kv_cache=True,
    sm_scale=1.0,
    sliding_window=None,
    soft_cap=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    custom_mask=None,
    mask_aligned_to_cu_kv=False,
    q_max=None,
):
    """`out` in f64, and the updated cache; scales are numbers or one per KV head."""
    kv_cache, out = kv_cache.copy(), np.zeros(queries.shape)
    (_, num_heads, d), kv_heads, page_size = queries.shape, keys.shape[1], kv_cache.shape[1]
    group = num_heads // kv_heads
    per_head = (np.broadcast_to(1.0 if x is None else np.float64(x), (kv_heads,)) for x in (q_scale, k_scale, v_scale))
    q_scales, k_scales, v_scales = per_head

    def place(b, token):
        if cu_kv_lens is None:
            first = b * (len(page_indices) // len(kv_lens))
        else:
            first = align(cu_kv_lens[b], page_size) // page_size
        return page_indices[first + token // page_size], token % page_size

    mask_start = 0
    for b in range(distribution[2]):
        start, end, length = cu_q_lens[b], cu_q_lens[b + 1], kv_lens[b]
        width = cu_kv_lens[b + 1] - cu_kv_lens[b] if mask_aligned_to_cu_kv else length
        mask_end = mask_start + (end - start) * width
        position = length - (end - start)
        if update_kv_cache:
            for t in range(start, end):
                page, offset = place(b, position + t - start)
                kv_cache[page, offset] = 0
                for h in range(kv_heads):
                    k, v = rows_of(kv_cache, layout, page, offset, h, d)
                    k[:], v[:] = keys[t, h], values[t, h]
        for h in range(num_heads):
            rows = [rows_of(kv_cache, layout, *place(b, token), h // group, d) for token in range(length)]
            k, v = (np.float64([row[i] for row in rows]).reshape(length, d) for i in (0, 1))
            g = h // group
            q = np.float64(queries[start:end, h])
            if q_scale is not None:
                largest = FP8.get(kv_cache.dtype.name, np.inf)
                q = np.float64(converted(np.clip(q / q_scales[g], -largest, largest), kv_cache.dtype))
            scores = sm_scale * q_scales[g] * k_scales[g] * (q @ k.T)
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            distance = position + np.arange(end - start)[:, None] - np.arange(length)
            visible = np.ones(scores.shape, bool) if not use_causal_mask else distance >= 0
            if custom_mask is not None:
                visible = custom_mask[mask_start:mask_end].reshape(-1, width)[:, :length] != 0
            if sliding_window is not None:
                visible &= distance < sliding_window
            weights = np.where(visible, np.exp(scores - scores.max(initial=-1e30)), 0)
            sink = 0 if attention_sink is None else np.exp(attention_sink[h] - scores.max(initial=-1e30))
            total = weights.sum(1, keepdims=True) + sink
            out[start:end, h] = v_scales[g] * (weights @ v) / np.where(total == 0, 1, total)
        mask_start = mask_end
    return out, kv_cache
