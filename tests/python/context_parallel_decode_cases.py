"""Batches over a cache that is spread over devices, for context_parallel_decode_program.py."""

import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_attention.jax import context_parallel_block_tables, flash_attn_varlen, kv_cache_update

PAGE_SIZE, SCALE = 4, 0.3
DEVICES = int(os.environ.get("CONTEXT_PARALLEL_DEVICES", "4"))
LENGTHS = range(2 * DEVICES * PAGE_SIZE + 2)  # from 0 to two pages on each device and one token


class Case(NamedTuple):
    """How a batch over sequences of LENGTHS is computed."""

    rows: str = "one"  # new tokens per sequence: one, or 1 to 7
    passes_rows: bool = False  # whether new keys and values are arguments of the attention
    heads: tuple = (8, 2)
    dims: tuple = (16, 16)
    dtype: str = "float32"
    cache: str | None = None
    kv_layout: str | None = "interleaved"
    scale_of: str = ""  # "heads" or "one": k_scale and v_scale
    options: dict = {}  # noqa: RUF012
    has_sinks: bool = False
    scatter: bool = False
    gather: bool = False
    axes: str = "cp"  # "cp", "explicit cp", "a b" for pages over two mesh axes, "cp tp" for heads over another one
    check_vma: bool = True
    is_slow: bool = False  # one of the combinations that only slow tests run


NEW = {"rows": "several", "passes_rows": True}
FP8 = {"cache": "float8_e4m3fn", "dtype": "bfloat16"}
CAPPED = {"soft_cap": 1.5}
WINDOW = {"sliding_window": 6}
CASES = {
    "decode": Case(),
    "decode, bf16, sinks, soft cap, scattered": Case(
        is_slow=True, dtype="bfloat16", has_sinks=True, scatter=True, options=CAPPED
    ),
    "decode, f16, gathered and scattered": Case(is_slow=True, dtype="float16", heads=(8, 4), gather=True, scatter=True),
    "decode, gathered, sinks, window": Case(gather=True, has_sinks=True, options=WINDOW),
    "decode, fp8 cache": Case(**FP8, is_slow=True, scale_of="one"),
    "decode, fp8 queries": Case(dtype="float8_e4m3fn", cache="float8_e4m3fn", scale_of="heads"),
    "decode, f16 from fp8 queries": Case(
        is_slow=True, dtype="float8_e4m3fn", cache="float8_e4m3fn", options={"out_dtype": "float16"}, scatter=True
    ),
    "decode, heads over another axis": Case(heads=(8, 4), axes="cp tp", has_sinks=True),
    "decode, f32 from bf16": Case(is_slow=True, dtype="bfloat16", options={"out_dtype": "float32"}),
    "new rows, f32 from f16, scattered": Case(
        **NEW, is_slow=True, dtype="float16", options={"out_dtype": "float32"}, scatter=True
    ),
    "decode, explicit axis": Case(is_slow=True, axes="explicit cp", gather=True),
    "decode, pages over two axes": Case(axes="a b", scatter=True),
    "decode, one KV head, unchecked types": Case(is_slow=True, heads=(4, 1), check_vma=False),
    "decode, new rows as arguments": Case(is_slow=True, passes_rows=True),
    "several rows": Case(is_slow=True, rows="several", kv_layout="per_page", has_sinks=True),
    "several rows, window, values of another dimension": Case(
        rows="several", kv_layout=None, dims=(16, 8), options=WINDOW, has_sinks=True
    ),
    "new rows": Case(**NEW, is_slow=True),
    "new rows, batch invariant, values of another dimension": Case(
        **NEW, is_slow=True, kv_layout=None, dims=(16, 24), options={"batch_invariant": True}, has_sinks=True
    ),
    "new rows, bf16, stacked, sinks, soft cap, scattered": Case(
        **NEW, dtype="bfloat16", kv_layout="stacked", has_sinks=True, scatter=True, options=CAPPED
    ),
    "new rows, window, sinks, scattered": Case(**NEW, is_slow=True, options=WINDOW, has_sinks=True, scatter=True),
    "new rows, 3 KV heads, scattered": Case(**NEW, heads=(12, 3), scatter=True, gather=True),
    "new rows, 8 KV heads, scattered": Case(**NEW, is_slow=True, heads=(8, 8), scatter=True),
    "new rows, fp8 cache, scattered": Case(**NEW, **FP8, scale_of="heads", scatter=True),
    "new rows, fp8 cache of e5m2, window": Case(
        is_slow=True, **NEW, dtype="float16", cache="float8_e5m2", kv_layout="per_page", options=WINDOW
    ),
    "new rows, scales of a cache in f32": Case(**NEW, is_slow=True, scale_of="heads"),
}


class Batch(NamedTuple):
    """A batch, its whole cache, and the same cache spread over the devices."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    positions: np.ndarray  # i32[T], -1 for padding rows and for rows before the first key
    slots: np.ndarray  # of the whole cache
    lens: np.ndarray
    starts: np.ndarray
    num_seqs: np.ndarray
    tables: np.ndarray
    whole: tuple[jax.Array, jax.Array]  # K and V, pages of one device
    local_tables: np.ndarray  # [n, S, M]
    pages: np.ndarray  # of the whole cache, by device; -1 for a free one
    free_page: int  # a page of the whole cache that no sequence has
    sinks: jax.Array | None
    scales: dict[str, jax.Array]


def in_layout(k, v, kv_layout):
    """Pages ``[P, page_size, Hkv, D]`` of K and V as a cache: an array, or a pair."""
    if kv_layout is None:
        return k, v
    if kv_layout == "interleaved":
        return jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[-1])
    return jnp.stack([k, v], axis={"stacked": 0, "per_page": 1}[kv_layout])


def batch_of(case, num_devices=DEVICES):
    """A batch with a sequence of each of LENGTHS, two unused slots and three padding rows.

    Slots of new tokens, the rest of a sequence's last page, and free pages hold NaN.
    """
    rng = np.random.default_rng(0)
    lens = np.array([*LENGTHS, 99, 5], np.int32)
    used = len(LENGTHS)
    rows = np.ones_like(lens) if case.rows == "one" else 1 + np.arange(len(lens)) % 7
    # Without rows as arguments, some sequences have a row more than keys.
    rows = np.minimum(rows, lens if case.passes_rows else lens + 1)
    total = rows[:used].sum() + 3
    starts = np.array([0, *np.cumsum(rows[:used]), 1, 0], np.int32)
    positions = np.full(total, -1, np.int32)
    sequence = np.repeat(np.arange(used), rows[:used])
    positions[:-3] = np.arange(total - 3) - starts[sequence] + (lens - rows)[sequence]

    columns = -(-LENGTHS[-1] // PAGE_SIZE)
    tables = rng.permutation((used + 3) * columns).reshape(-1, columns).astype(np.int32)
    free_page, tables = tables[-1, 0], tables[:-1]
    stored = [(b, j) for b in range(used) for j in range(lens[b] - rows[b])]
    stored = np.array(stored).T

    def slots_of(sequences, tokens):
        return tables[sequences, tokens // PAGE_SIZE] * PAGE_SIZE + tokens % PAGE_SIZE

    slots = np.full(total, -1, np.int32)
    slots[:-3] = np.where(positions[:-3] >= 0, slots_of(sequence, np.maximum(positions[:-3], 0)), -1)

    (query_heads, kv_heads), dims = case.heads, case.dims
    scales = {}
    if case.scale_of:
        names = ("k_scale", "v_scale") + (("q_scale",) if case.dtype.startswith("float8") else ())
        scales = {x: jnp.float32(rng.uniform(0.5, 2, kv_heads if case.scale_of == "heads" else 1)) for x in names}
    row_dtype = "bfloat16" if case.dtype.startswith("float8") else case.dtype

    def numbers(rows, heads, dim, dtype=row_dtype):
        return jnp.array(rng.standard_normal((rows, heads, dim), np.float32)).astype(dtype)

    whole = [jnp.full(((used + 3) * columns, PAGE_SIZE, kv_heads, d), jnp.nan, case.cache or row_dtype) for d in dims]
    old = [numbers(stored.shape[1], kv_heads, d) for d in dims]
    whole = kv_cache_update(whole, *old, slots_of(*stored), **stored_scales(scales))
    # Unused slots have lengths that their tables cannot hold.
    local_tables, pages = context_parallel_block_tables(tables[:used], lens[:used], PAGE_SIZE, num_devices)
    local_tables = np.pad(local_tables, ((0, 0), (0, 2), (0, 0)), constant_values=-7)
    return Batch(
        numbers(total, query_heads, dims[0], case.dtype),
        *(numbers(total, kv_heads, d) for d in dims),
        positions,
        slots,
        lens,
        starts,
        np.array([used], np.int32),
        tables,
        whole,
        local_tables,
        pages,
        free_page,
        jnp.linspace(-1, 2, query_heads) if case.has_sinks else None,
        scales,
    )


def stored_scales(scales):
    """The scales that a cache update takes."""
    return {name: scale for name, scale in scales.items() if name != "q_scale"}


def on_one_device(case, batch):
    """Output, log-sum-exp and updated cache, by one cache update and one call of flash_attn_varlen."""
    k, v = kv_cache_update(batch.whole, batch.key, batch.value, batch.slots, **stored_scales(batch.scales))
    options = dict(case.options)
    window = options.pop("sliding_window", 0)
    used = batch.num_seqs[0]
    out, lse = flash_attn_varlen(
        batch.query,
        k,
        v,
        batch.starts[: used + 1],
        seqused_k=batch.lens[:used],
        block_table=batch.tables[:used],
        softmax_scale=SCALE,
        causal=True,
        window=(window - 1, 0),
        softcap=options.pop("soft_cap", 0.0),
        sinks=batch.sinks,
        return_lse=True,
        **batch.scales,
        **options,
    )
    return out, lse, (k, v)
