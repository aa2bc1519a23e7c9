"""Our operators in ejkernel's registry: its public functions select them, with the results of its own kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("ejkernel")

from ejkernel.errors import EjkernelRuntimeError
from ejkernel.kernels import kernel_registry
from ejkernel.modules.operations import ragged_page_attention_v2, ragged_page_attention_v3, unified_attention
from ejkernel.modules.operations.configs import (
    RaggedPageAttentionv2Config,
    RaggedPageAttentionv3Config,
    UnifiedAttentionConfig,
)

from xla_attention.integrations.ejkernel import register

ALGORITHMS = ["ragged_page_attention_v3", "ragged_page_attention_v2", "unified_attention"]
# New tokens and keys of three sequences, in pages of 4 tokens, 5 pages for each sequence.
NEW, KEYS, PAGE, COLUMNS = [1, 6, 3], [9, 6, 17], 4, 5
HEADS, KV_HEADS = 8, 2
SINKS = jnp.linspace(-1, 1, HEADS)


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


def numbers(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def sequences():
    """Lengths, a table of pages, and starts."""
    table = np.random.default_rng(5).permutation(len(NEW) * COLUMNS).reshape(len(NEW), COLUMNS)
    return jnp.int32(KEYS), jnp.asarray(table, jnp.int32), jnp.int32(np.cumsum([0, *NEW]))


def by_platform(function, config, operands, **options):
    """The results of ejkernel's own kernels and of ours, and our program."""
    results = {}
    for platform in ("xla", "cuda"):
        # A configuration keeps ejkernel from measuring candidates.
        call = jax.jit(functools.partial(function, cfg=config(), platform=platform, **options))
        results[platform] = call(*operands)
        program = call.lower(*operands).as_text()
    return results["xla"], results["cuda"], program


def assert_equal(theirs, ours, tolerance):
    np.testing.assert_allclose(np.float32(ours), np.float32(theirs), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 5},
        {"logits_soft_cap": 2.0},
        {"softmax_aux": SINKS},
        {"q_scale": 0.5, "k_scale": 0.5, "v_scale": 0.25},
        {"dtype": "bfloat16", "head_dim": 128},
        {"dtype": "float8_e5m2"},
    ],
    ids=str,
)
def test_ragged_page_attention_v3(options):
    options = {**options}
    cache_dtype, head_dim = jnp.dtype(options.pop("dtype", "float32")), options.pop("head_dim", 64)
    dtype = jnp.bfloat16 if cache_dtype.itemsize < 4 else jnp.float32
    rows, word = sum(NEW), 4 // cache_dtype.itemsize
    lens, table, starts = sequences()
    cache = numbers(3, len(NEW) * COLUMNS, PAGE, 2 * KV_HEADS // word, word, 128, dtype=cache_dtype)
    operands = (
        numbers(0, rows, HEADS, head_dim, dtype=dtype),
        *(numbers(seed, rows, KV_HEADS, head_dim, dtype=cache_dtype) for seed in (1, 2)),
        cache,
        lens,
        table.reshape(-1),
        starts,
        jnp.int32([1, 1, len(NEW)]),
        options.pop("softmax_aux", None),
    )
    arguments = {"softmax_scale": head_dim**-0.5, **options}
    theirs, ours, program = by_platform(ragged_page_attention_v3, RaggedPageAttentionv3Config, operands, **arguments)
    # Theirs drops, for all rows of a sequence, the pages before the window of its last row.
    rows = np.cumsum(NEW) - 1 if "sliding_window" in options else slice(None)
    assert_equal(theirs[0][rows], ours[0][rows], 2e-5 if dtype == jnp.float32 else 5e-2)
    np.testing.assert_array_equal(np.float32(theirs[1])[..., :head_dim], np.float32(ours[1])[..., :head_dim])
    assert program.count("@xla_gpu_paged_attention_update") == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_caches_with_k_and_v_in_one_row(dtype):
    """EasyDeL's caches for head dimension 64, as ejkernel has them on TPUs, give the results of the other form."""
    lens, table, starts = sequences()
    q, k, v = (numbers(i, sum(NEW), n, 64, dtype=dtype) for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    pages = numbers(3, len(NEW) * COLUMNS, PAGE, KV_HEADS, 2, 64, dtype=dtype)
    word = 4 // jnp.dtype(dtype).itemsize
    one_row = pages.reshape(*pages.shape[:2], KV_HEADS // word, word, 128)
    two_rows = jnp.pad(pages, [(0, 0)] * 4 + [(0, 64)]).reshape(*pages.shape[:2], 2 * KV_HEADS // word, word, 128)
    results = []
    for cache in (one_row, two_rows):
        options = {"cfg": RaggedPageAttentionv3Config(), "platform": "cuda", "softmax_scale": 0.125}
        metadata = (lens, table.reshape(-1), starts, jnp.int32([1, 1, len(NEW)]))
        out, updated = ragged_page_attention_v3(q, k, v, cache, *metadata, **options)
        assert updated.shape == cache.shape
        results.append((out, updated.reshape(*pages.shape[:4], -1)[..., :64]))
    np.testing.assert_array_equal(*(np.float32(out) for out, _ in results))
    np.testing.assert_array_equal(*(np.float32(updated) for _, updated in results))
    assert not np.array_equal(np.float32(results[0][1]), np.float32(pages))


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 5}, {"logits_soft_cap": 2.0}, {"softmax_aux": SINKS}], ids=str
)
def test_ragged_page_attention_v2(options):
    lens, table, starts = sequences()
    pages = numbers(3, len(NEW) * COLUMNS, PAGE, 2 * KV_HEADS, 64)
    options = {**options}
    sinks = options.pop("softmax_aux", None)
    operands = (numbers(0, sum(NEW), HEADS, 64), pages, lens, table, starts, jnp.int32(len(NEW)), sinks)
    theirs, ours, program = by_platform(
        ragged_page_attention_v2, RaggedPageAttentionv2Config, operands, compute_dtype=jnp.float32, **options
    )
    assert_equal(theirs, ours, 2e-5)
    assert "@xla_gpu_paged_attention(" in program


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 5},
        {"logits_soft_cap": 2.0},
        {"softmax_aux": SINKS, "softmax_scale": 0.3},
        {"alibi_slopes": jnp.linspace(0.1, 0.8, HEADS)},
    ],
    ids=str,
)
def test_unified_attention(options):
    options = {**options}
    lens, table, starts = sequences()
    caches = (numbers(seed, len(NEW) * COLUMNS, PAGE, KV_HEADS, 64) for seed in (3, 4))
    bias = (options.pop("alibi_slopes", None), None, options.pop("softmax_aux", None))
    operands = (numbers(0, sum(NEW), HEADS, 64), *caches, lens, table, starts, *bias)
    theirs, ours, program = by_platform(unified_attention, UnifiedAttentionConfig, operands, **options)
    assert_equal(theirs, ours, 2e-5)
    assert "@xla_gpu_flash_attn_varlen(" in program


def test_what_is_not_supported_is_their_error():
    lens, table, starts = sequences()
    caches = (numbers(seed, len(NEW) * COLUMNS, PAGE, KV_HEADS, 64) for seed in (3, 4))
    operands = (numbers(0, sum(NEW), HEADS, 64), *caches, lens, table, starts)
    call = kernel_registry.get("unified_attention", platform="cuda", backend="gpu")
    with pytest.raises(EjkernelRuntimeError, match="qq_bias is not supported: expected None"):
        call(*operands, qq_bias=jnp.zeros((10, 10)))
    with pytest.raises(EjkernelRuntimeError, match="causal=False is not supported"):
        call(*operands, causal=False)
    with pytest.raises(EjkernelRuntimeError, match="alibi_slopes with softmax_aux or logits_soft_cap is not supported"):
        call(*operands, alibi_slopes=SINKS, softmax_aux=SINKS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ours_are_preferred_and_registered_once(algorithm):
    register()
    ours = [x for x in kernel_registry.list_implementations(algorithm) if x.priority == 10]
    assert sorted(x.platform for x in ours) == ["cuda", "triton"]
    for platform in ("cuda", "triton"):
        assert "xla_attention" in kernel_registry.get(algorithm, platform, "gpu").__module__
    assert "xla_attention" not in kernel_registry.get(algorithm, "xla", "any").__module__


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"algorithms has \['ring_attention'\], expected some of"):
        register(["ring_attention"])
    with pytest.raises(ValueError, match=r"platforms has \['pallas'\], expected some of"):
        register(platforms=["pallas"])
