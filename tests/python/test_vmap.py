"""jax.vmap of the operators: the number of calls, and the results of each index."""

import jax
import numpy as np
import pytest

import xla_attention.jax
from calls import every_call, flatten
from xla_attention.jax import flash_attn_varlen, paged_attention

SIZE = 3
ROWS = "key value slot_mapping"
SEQUENCES = "context_lens block_tables query_start_loc num_seqs"
LENGTHS = "cu_seqlens_q cu_seqlens_k seqused_q seqused_k"
LATENT = "cu_seqlens_q seqused_k block_table"
LATENT_ROWS = "c_kv k_pe slot_mapping"
PAGES = "q k cu_seqlens_q block_table seqused_k"
# For each function: a call, its batched operands, and whether vmap is one call; otherwise it is a loop over the
# indices, as docs/sharding.md says.
CASES = {
    "simple_add": [("float32", "a b", 1), ("float32", "a", 1)],
    "merge_attention_states": [("float32", "out_a lse_a out_b lse_b", 1), ("float32", "out_a lse_a", 1)],
    "paged_attention": [
        ("plain", "query", 1),
        ("plain", f"query {SEQUENCES}", 1),
        ("plain", f"query kv_cache {SEQUENCES}", 1),
        ("plain", "kv_cache", 1),
        ("plain", "num_seqs", 1),
        ("alibi_slopes", f"query kv_cache {SEQUENCES} alibi_slopes", 1),
        ("alibi_slopes (6, 8)", f"query kv_cache {SEQUENCES}", 1),
        ("sinks", f"query kv_cache {SEQUENCES}", 1),
        ("sinks", f"query kv_cache {SEQUENCES} sinks", 0),
        ("tree_mask (6, 9, 1)", f"query kv_cache {SEQUENCES} tree_mask", 1),
        ("sliding_window+tree_mask (6, 4, 1)", f"query {SEQUENCES}", 1),
        ("k_start+k_end+tree_mask (6, 40, 2)", "k_end tree_mask", 1),
        ("scales bfloat16 int8 plain", f"query kv_cache {SEQUENCES} kv_scale_cache", 1),
        ("scales bfloat16 int8 plain", f"query {SEQUENCES}", 1),
        ("scales bfloat16 int8 plain", "kv_scale_cache", 1),
    ],
    "paged_attention_update": [
        ("plain", f"query kv_cache {SEQUENCES} {ROWS}", 1),
        ("plain", f"query {SEQUENCES} {ROWS}", 1),
        ("plain", "query kv_cache key value", 1),
        ("tree_mask (6, 9, 1)", f"query kv_cache {SEQUENCES} {ROWS} tree_mask", 1),
        ("scales bfloat16 int8 plain", f"query kv_cache {SEQUENCES} {ROWS} kv_scale_cache", 1),
        ("scales bfloat16 int8 plain", f"query {SEQUENCES} {ROWS}", 1),
    ],
    "mla_paged_attention": [
        ("plain", "q", 1),
        ("causal", f"q {LATENT}", 1),
        ("num_seqs", f"q kv_cache {LATENT} num_seqs", 1),
        ("plain", "kv_cache", 1),
        ("sinks", f"q kv_cache {LATENT}", 1),
        ("sinks", f"q {LATENT} sinks", 0),
    ],
    "mla_paged_attention_update": [
        ("plain", f"q kv_cache {LATENT} {LATENT_ROWS}", 1),
        ("causal", f"q {LATENT} {LATENT_ROWS}", 1),
        ("num_seqs", f"q kv_cache {LATENT} {LATENT_ROWS} num_seqs", 1),
        ("plain", "q kv_cache c_kv k_pe", 1),
    ],
    "kv_cache_update": [
        ("float32 interleaved plain", f"kv_cache {ROWS}", 1),
        ("float32 stacked plain", f"kv_cache {ROWS}", 1),
        ("float32 per_page plain", f"kv_cache {ROWS}", 1),
        ("float32 stacked plain", ROWS, 1),
        ("float32 interleaved plain", "kv_cache key value", 1),
        ("float32 interleaved k_scale", f"kv_cache {ROWS}", 1),
        ("float32 interleaved k_scale", f"kv_cache {ROWS} k_scale", 0),
        ("split float32", f"kv_cache {ROWS}", 1),
        ("scales float32 int8 interleaved", f"kv_cache {ROWS} kv_scale_cache", 1),
        ("scales bfloat16 float8_e4m3fn stacked", f"kv_cache {ROWS} kv_scale_cache", 1),
        ("scales float16 int8 per_page", f"{ROWS}", 1),
    ],
    "rope_kv_cache_update": [
        ("float32 interleaved False", f"kv_cache query {ROWS} positions", 1),
        ("float32 stacked False", f"kv_cache query {ROWS} positions", 1),
        ("float32 per_page False", f"kv_cache query {ROWS} positions", 1),
        ("float32 interleaved False", f"kv_cache query {ROWS} positions cos_sin", 0),
    ],
    "flash_attn_varlen": [
        ("plain", f"q k v {LENGTHS}", 1),
        ("plain", "q", 1),
        ("causal", LENGTHS, 1),
        ("leftpad_k", f"{LENGTHS} leftpad_k", 1),
        ("causal+q_offset", f"{LENGTHS} q_offset", 1),
        ("k_start+k_end", f"q {LENGTHS} k_start k_end", 1),
        ("k_start+k_end", "k_start", 1),
        ("causal+k_start", "q", 1),
        ("alibi_slopes (5, 8)", "q alibi_slopes", 1),
        ("bias (5, 8, 20, 50)", f"q {LENGTHS} bias", 1),
        ("bias (5, 8, 20, 50)", "q", 1),
        ("causal+softcap+bias (1, 1, 20, 31)", "k v", 1),
        ("causal+softcap+bias (1, 1, 20, 31)", "bias", 1),
        ("sinks", "q sinks", 0),
        ("pages stacked", "q cu_seqlens_q block_table seqused_k", 1),
        ("pages interleaved", PAGES, 1),
        ("pages per_page", "q k block_table seqused_k", 1),
        ("pages stacked", PAGES, 0),
    ],
    "gather_kv_cache": [
        ("interleaved float32", "kv_cache", 1),
        ("interleaved float32", "block_tables context_lens", 1),
        ("interleaved float32", "context_lens", 1),
        ("per_page float32", "kv_cache block_tables context_lens", 1),
        ("split float32", "kv_cache block_tables", 1),
        ("stacked float32", "block_tables context_lens", 1),
        ("stacked float32", "kv_cache", 0),
        ("scales float32 int8 interleaved", "kv_cache kv_scale_cache", 1),
        ("scales float32 int8 interleaved", "block_tables kv_scale_cache", 1),
        ("scales bfloat16 float8_e4m3fn stacked", "kv_cache kv_scale_cache", 0),
        ("scales float16 int8 per_page", "kv_scale_cache context_lens", 1),
    ],
}
CASES = [(f"{function}: {name}", *case) for function, cases in CASES.items() for name, *case in cases]
# Values for each index of metadata that do not depend on the seed of `calls.py`.
METADATA = {
    "num_seqs": np.int32([[0], [9], [2]]),
    "cu_seqlens_q": lambda x: [x, np.r_[2, 5, x[2:] - 3], np.r_[-5, x[1:-1], 99]],
    "cu_seqlens_k": lambda x: [x, np.r_[0, 20, x[2:]], np.r_[3, x[1:-1], 2**31 - 1]],
    "seqused_k": lambda x: [x, x[::-1], np.r_[-4, 100, x[2:]]],
    "leftpad_k": lambda x: [x, x[::-1], x // 2],
    "q_offset": lambda x: [x, x[::-1], x // 2],
    "k_start": lambda x: [x, x[::-1], x // 2],
    "k_end": lambda x: [x, x + 3, np.r_[-4, 100, x[2:]]],
    "tree_mask": lambda x: [x, x[::-1], ~x],
}


def operands_of(name, batched):
    """The function of the batched operands, and these, stacked from SIZE calls with different numbers."""
    call, others = every_call()[name], [every_call(seed)[name] for seed in range(SIZE)]
    constant = {operand: x for operand, x in call.arguments.items() if operand not in batched}

    def function(*operands):
        return flatten(
            getattr(xla_attention.jax, call.function)(**constant, **dict(zip(batched, operands, strict=True)))
        )

    stacked = []
    for operand in batched:
        values = [other.arguments[operand] for other in others]
        if (metadata := METADATA.get(operand)) is not None:
            values = metadata(values[0]) if callable(metadata) else metadata
        if isinstance(values[0], tuple):
            stacked.append(tuple(np.stack(x) for x in zip(*values, strict=True)))
        else:
            stacked.append(np.stack([np.asarray(x, values[0].dtype) for x in values]))
    return function, stacked


def assert_each(actual, function, operands):
    """Assert that every index has the results of a single call."""
    for index in range(SIZE):
        single = function(*jax.tree.map(lambda x, index=index: x[index], operands))
        for batched, expected in zip(actual, single, strict=True):
            np.testing.assert_allclose(np.asarray(batched)[index], expected, atol=1e-5)


def program(function, operands):
    """The results, and the numbers of custom calls and of loops in the program."""
    lowered = jax.jit(function).lower(*operands)
    text = lowered.as_text()
    calls = text.count("custom_call @xla_gpu_"), text.count("stablehlo.while")
    return [np.asarray(x) for x in lowered.compile()(*operands)], calls


@pytest.mark.parametrize(("name", "batched", "is_one_call"), CASES)
def test_each_index_gives_the_results_of_a_single_call(platform, name, batched, is_one_call):
    function, operands = operands_of(name, batched.split())
    actual, (calls, loops) = program(jax.vmap(function), operands)
    assert_each(actual, function, operands)
    assert calls == 1 and (loops == 0) == is_one_call


@pytest.mark.parametrize(
    "case",
    [
        ("simple_add: float32", "a b"),
        ("merge_attention_states: float32", "out_a lse_a out_b lse_b"),
        ("paged_attention: plain", f"query kv_cache {SEQUENCES}"),
        ("kv_cache_update: float32 stacked plain", f"kv_cache {ROWS}"),
        ("rope_kv_cache_update: float32 interleaved False", f"kv_cache query {ROWS} positions"),
        ("gather_kv_cache: interleaved float32", "kv_cache context_lens"),
    ],
)
def test_nested_vmap_is_one_call(platform, case):
    function, operands = operands_of(case[0], case[1].split())
    doubled = [np.stack([x, x[::-1]]) for x in operands]
    actual, calls = program(jax.vmap(jax.vmap(function)), doubled)
    assert_each([x[0] for x in actual], function, operands)
    assert_each([x[1, ::-1] for x in actual], function, operands)
    assert calls == (1, 0)


def test_wrong_metadata_of_one_index_does_not_affect_another(platform):
    """Decreasing starts, and lengths, pages and counts that are out of range."""
    rng = np.random.default_rng(0)

    def numbers(*shape):
        return np.float32(rng.standard_normal(shape))

    def nonsense(*shape, below):
        far = rng.choice([-(2**31), 2**31 - 1], shape)
        return np.int32(np.where(rng.random(shape) < 0.15, far, rng.integers(-3, below, shape)))

    def over_pages(query, cache, lens, tables, starts, count):
        return paged_attention(query, cache, lens, tables, starts, count, scale=0.3, return_lse=True, sinks=sinks)

    def over_rows(query, rows, lens, _, starts, more):
        return flash_attn_varlen(query, rows, rows, starts, more, seqused_k=lens, causal=True, return_lse=True)

    sinks, rows = numbers(4), numbers(9, 2, 16)
    single = [jax.jit(over_pages), jax.jit(over_rows)]
    mapped = [jax.jit(jax.vmap(f, in_axes=(0, axis, 0, 0, 0, 0))) for f, axis in ((over_pages, 0), (over_rows, None))]
    for _ in range(20):
        query, cache = numbers(SIZE, 6, 4, 16), numbers(SIZE, 5, 4, 4, 16)
        lens, tables, starts = nonsense(SIZE, 3, below=10), nonsense(SIZE, 3, 2, below=6), nonsense(SIZE, 4, below=9)
        last = nonsense(SIZE, 1, below=5), nonsense(SIZE, 4, below=12)
        for function, batched, keys, more in zip(single, mapped, (cache, rows), last, strict=True):
            actual = [np.asarray(x) for x in batched(query, keys, lens, tables, starts, more)]
            for i in range(SIZE):
                expected = function(
                    query[i], keys[i] if keys is cache else keys, lens[i], tables[i], starts[i], more[i]
                )
                for part, expected_part in zip(actual, expected, strict=True):
                    np.testing.assert_allclose(part[i], expected_part, atol=1e-5)
