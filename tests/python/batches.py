"""Ragged batches for paged attention: random, with everything that belongs to no sequence poisoned."""

import jax.numpy as jnp
import numpy as np


def batch(
    sequences, *, heads=(8, 2), d=64, page_size=16, dtype="float32", spare_slots=1, spare_rows=2, table_slack=1, seed=0
):
    """Operands of paged_attention for `sequences`, a list of (new tokens, keys).

    Unused slots of pages, unused pages, padding rows of the query, lengths and starts of unused sequence slots and
    unused table entries hold NaN or nonsense. Pages are shuffled.
    """
    rng = np.random.default_rng(seed)
    q_heads, kv_heads = heads
    used = [-(-keys // page_size) for _, keys in sequences]
    pages, slots = sum(used) + 3, len(sequences) + spare_slots
    cache = np.full((pages, page_size, 2 * kv_heads, d), np.nan, np.float32)
    tables = rng.integers(-(2**31), 2**31, (slots, max([*used, 0]) + table_slack)).astype(np.int32)
    free = rng.permutation(pages).tolist()
    for i, (_, keys) in enumerate(sequences):
        for page in range(used[i]):
            tables[i, page] = free.pop()
            tokens = min(page_size, keys - page * page_size)
            cache[tables[i, page], :tokens] = rng.standard_normal((tokens, 2 * kv_heads, d))
    starts = np.cumsum([0, *(new for new, _ in sequences)])
    rows = int(starts[-1])
    query = np.full((rows + spare_rows, q_heads, d), np.nan, np.float32)
    query[:rows] = rng.standard_normal((rows, q_heads, d))
    lens = np.full(slots, 2**31 - 1)
    lens[: len(sequences)] = [keys for _, keys in sequences]
    query_start_loc = np.concatenate([starts, np.full(spare_slots, -7)])
    i32 = [jnp.asarray(x, jnp.int32) for x in (lens, tables, query_start_loc, [len(sequences)])]
    return jnp.asarray(query, dtype), jnp.asarray(cache, dtype), *i32
