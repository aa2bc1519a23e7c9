"""ragged_paged_attention_v3: the mapping of its arguments to our operators, and its custom calls."""

import functools
import inspect
import sys

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from packed_caches import expected_results, packed_batch
from xla_attention.integrations import ejkernel, sglang_jax
from xla_attention.jax import export_disabled_checks, ragged_paged_attention_v3

MIXED = [(1, 9), (6, 6), (3, 17), (1, 1)]
DECODE = [(1, 9), (1, 12), (1, 1)]
SINKS = np.linspace(-2, 2, 8, dtype=np.float32)
HD64 = {"layout": "concatenated", "d": 64}
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def run(operands, options, layout="interleaved"):
    """Results as f32 NumPy arrays, from one program whose arrays are all its arguments."""
    attend = functools.partial(ragged_paged_attention_v3, kv_layout=layout, **options)
    out, cache = jax.jit(lambda operands: attend(**operands))(operands)
    return np.asarray(out), np.asarray(cache)


def assert_equals_definition(operands, options, layout="interleaved", tolerance=None):
    out, cache = run(operands, options, layout)
    expected, expected_cache = expected_results(**operands, layout=layout, **options)
    tolerance = tolerance or {4: 2e-5, 2: 3e-2}[out.dtype.itemsize]
    np.testing.assert_allclose(np.float64(out), expected, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(np.float32(cache), np.float32(expected_cache))


@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sm_scale": 0.09},
        {"sliding_window": 5, "sm_scale": 0.1},
        {"soft_cap": 2.0, "sm_scale": 0.1},
        {"attention_sink": SINKS, "sm_scale": 0.1},
        {"use_causal_mask": False, "sm_scale": 0.1},
        {"use_causal_mask": False, "sliding_window": 4, "soft_cap": 3.0, "attention_sink": SINKS, "sm_scale": 0.1},
        {"q_scale": 0.5, "k_scale": 0.5, "v_scale": 0.25, "sm_scale": 0.1},
        {"k_scale": np.float32([0.1, 0.2]), "v_scale": np.float32([0.5, 2])},
        {"use_causal_mask": False, "k_scale": 0.1, "v_scale": np.float32([0.5, 2])},
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_results_equal_the_definition(platform, options, layout):
    operands = packed_batch(MIXED, d=64 if layout == "concatenated" else 128, layout=layout)
    out, cache = run(operands, options, layout)
    options = {name: x for name, x in options.items() if name != "batch_invariant"}
    expected, expected_cache = expected_results(**operands, layout=layout, **options)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_array_equal(cache, expected_cache)


@pytest.mark.parametrize(
    "form",
    [
        {"d": 128},
        {"d": 64},
        {"d": 80, "heads": (12, 2)},
        {"d": 240, "heads": (5, 1)},
        {"d": 128, "heads": (6, 3)},
        {"d": 8, "heads": (3, 3)},
        HD64,
        HD64 | {"heads": (5, 5)},
        HD64 | {"heads": (8, 1)},
        {"page_size": 1},
        {"page_size": 16},
        {"spare_rows": 0, "spare_slots": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "dtypes",
    [
        ("bfloat16", E4M3),
        *(pytest.param(x, marks=pytest.mark.slow) for x in (("float32", ""), ("bfloat16", ""), ("float16", E5M2))),
    ],
    ids=str,
)
def test_every_form_of_the_cache(platform, form, dtypes):
    dtype, cache = dtypes
    operands = packed_batch(MIXED, dtype=dtype, cache=cache, **form)
    options = {"sm_scale": form.get("d", 128) ** -0.5}
    assert_equals_definition(operands, options, form.get("layout", "interleaved"))


@pytest.mark.parametrize("cache", [E4M3, E5M2])
@pytest.mark.parametrize(
    "options",
    [
        {"k_scale": 0.5, "v_scale": 0.3},
        {"q_scale": 0.5, "k_scale": 0.5, "v_scale": 0.5},
        {"q_scale": np.float32([0.01, 0.02]), "v_scale": np.float32([3, 0.1])},
        {"use_causal_mask": False, "q_scale": 0.5, "k_scale": 0.7, "v_scale": 0.3},
    ],
    ids=str,
)
def test_quantised_caches(platform, cache, options):
    operands = packed_batch(MIXED, heads=(4, 2), dtype="bfloat16", cache=cache)
    assert_equals_definition(operands, {"sm_scale": 0.1, **options}, tolerance=5e-2)


@pytest.mark.parametrize("heads", [(4, 1), (6, 3)])
def test_scales_and_sinks_belong_to_their_heads_where_the_cache_has_more(platform, heads):
    scale = np.linspace(0.5, 1, heads[1], dtype=np.float32)
    options = {"k_scale": scale, "v_scale": 2 * scale, "attention_sink": SINKS[: heads[0]], "sm_scale": 0.1}
    operands = packed_batch(MIXED, heads=heads, dtype="bfloat16", cache=E4M3)
    assert operands["kv_cache"].shape[2] * 4 > 2 * heads[1]
    assert_equals_definition(operands, options)


@pytest.mark.parametrize("pages_per_seq", [None, 6])
@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
def test_page_indices_without_gaps(platform, layout, pages_per_seq):
    operands = packed_batch(MIXED, ragged=True, layout=layout, d=64)
    out, cache = run(operands, {"pages_per_seq": pages_per_seq}, layout)
    expected, expected_cache = expected_results(**operands, layout=layout)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_array_equal(cache, expected_cache)


def custom_masks(operands, *, aligned):
    """Random masks of the newest keys, with all older ones visible; `aligned` as `mask_aligned_to_cu_kv`."""
    random, masks = np.random.default_rng(5), []
    for b in range(operands["distribution"][2]):
        rows, keys = operands["cu_q_lens"][b + 1] - operands["cu_q_lens"][b], operands["kv_lens"][b]
        width = operands["cu_kv_lens"][b + 1] - operands["cu_kv_lens"][b] if aligned else keys
        mask = random.integers(0, 2, (rows, width), np.int32)
        mask[:, : keys - rows] = 1
        mask[:, keys - 1] = 1  # no row without a key
        masks.append(mask.ravel())
    return np.concatenate([*masks, np.ones(7, np.int32)])


@pytest.mark.parametrize("q_max", [None, 6])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 8, "attention_sink": SINKS}, {"mask_aligned_to_cu_kv": True}], ids=str
)
def test_masks_of_all_keys_are_trees(platform, options, q_max):
    aligned = "mask_aligned_to_cu_kv" in options
    operands = packed_batch(MIXED, ragged=aligned)
    masks = {"custom_mask": custom_masks(operands, aligned=aligned), "use_causal_mask": False, "q_max": q_max}
    assert_equals_definition(operands, {**options, **masks, "sm_scale": 0.1})


def test_a_large_mask_needs_the_most_rows_of_a_sequence():
    operands = packed_batch([(1, 1)] * 500)
    options = {"custom_mask": np.ones(500, np.int32), "use_causal_mask": False}
    with pytest.raises(ValueError, match=r"q_max is None, expected the most rows of a sequence: S \* T \* T is"):
        run(operands, options)
    run(operands, {**options, "q_max": 1})


@pytest.mark.parametrize("use_causal_mask", [True, False])
def test_layers_that_share_a_cache_do_not_read_the_new_rows(platform, use_causal_mask):
    operands = packed_batch(MIXED)
    options = {"sm_scale": 0.1, "use_causal_mask": use_causal_mask}
    expected, operands["kv_cache"] = run(operands, options)
    operands["keys"] = operands["values"] = np.full_like(operands["keys"], np.nan)
    out, cache = run(operands, {**options, "update_kv_cache": False})
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(cache, operands["kv_cache"])


@pytest.mark.parametrize("scale", [1.0, 0.3, -7e-3, 2.0**-90, 1e25])
@pytest.mark.parametrize("cache", [E4M3, pytest.param(E5M2, marks=pytest.mark.slow)])
def test_quantised_rows_are_stored_with_their_bits(platform, cache, scale):
    operands = packed_batch([(2, 2)], heads=(1, 1), dtype="bfloat16", cache=cache, spare_rows=0, page_size=2)
    codes = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, cache))
    codes = np.where(np.isfinite(codes.astype(np.float32)), codes, np.zeros_like(codes)).reshape(2, 1, 128)
    operands["keys"] = operands["values"] = codes
    for causal in (True, False):
        _, stored = run(operands, {"v_scale": scale, "use_causal_mask": causal})
        page = operands["page_indices"][0]
        np.testing.assert_array_equal(stored.view(np.uint8)[page, :, 0, 0], codes.view(np.uint8)[:, 0])
        np.testing.assert_array_equal(stored.view(np.uint8)[page, :, 0, 1], codes.view(np.uint8)[:, 0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("sm_scale", 0.1), ("q_scale", 0.3), ("k_scale", 0.3), ("v_scale", 0.3), ("k_scale", [0.3, 0.2])],
)
@pytest.mark.parametrize("cache", [pytest.param("", marks=pytest.mark.slow), E4M3])
def test_scales_may_be_traced(platform, cache, name, value):
    operands = packed_batch(MIXED, dtype="bfloat16", cache=cache)
    value = np.float32(value)
    expected, _ = run(operands, {"sm_scale": 0.1, name: value if value.ndim else float(value)})
    constant = {} if name == "sm_scale" else {"sm_scale": 0.1}
    out, _ = run({**operands, name: value}, constant)
    np.testing.assert_allclose(np.float32(out), np.float32(expected), atol=2e-2)
    assert np.abs(np.float32(out)).max() > 0.1


# ---------- programs


def lowered(operands, *, donate=False, **options):
    """A program whose arguments are the operands, lowered."""

    def attend(kv_cache, others):
        return ragged_paged_attention_v3(kv_cache=kv_cache, **others, **options)

    others = {name: x for name, x in operands.items() if name != "kv_cache"}
    program = jax.jit(attend, donate_argnums=0 if donate else ())
    return program.lower(jnp.asarray(operands["kv_cache"]), others), others


def custom_calls(text):
    return [part.split('"')[0] for part in text.split('custom_call_target="')[1:] if part.startswith("xla_gpu")]


@pytest.mark.parametrize("sequences", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ({"d": 128, "dtype": "bfloat16"}, "interleaved"),
        ({"d": 80, "dtype": "bfloat16", "heads": (6, 3)}, "interleaved"),
        ({"d": 128, "dtype": "bfloat16", "cache": E4M3, "heads": (4, 1)}, "interleaved"),
        ({"dtype": "bfloat16", "heads": (5, 5), **HD64}, "concatenated"),
        ({"d": 64, "ragged": True}, "interleaved"),
    ],
    ids=str,
)
def test_a_layer_is_one_custom_call(platform, sequences, form, layout):
    options = {"kv_layout": layout, "sm_scale": 0.1, "k_scale": 0.5, "v_scale": 0.5, "sliding_window": 7}
    text = lowered(packed_batch(sequences, **form), **options)[0].compile().as_text()
    assert custom_calls(text) == ["xla_gpu_paged_attention_update"]


def test_calls_that_are_no_fused_update(platform):
    calls = {
        (True, False): ["xla_gpu_paged_attention"],
        (False, True): ["xla_gpu_kv_cache_update", "xla_gpu_flash_attn_varlen"],
        (False, False): ["xla_gpu_flash_attn_varlen"],
    }
    for (causal, update), expected in calls.items():
        program, _ = lowered(packed_batch(MIXED), use_causal_mask=causal, update_kv_cache=update)
        assert custom_calls(program.compile().as_text()) == expected


@pytest.mark.parametrize("use_causal_mask", [True, False])
@pytest.mark.parametrize("form", [{}, HD64, {"cache": E4M3, "dtype": "bfloat16"}, {"heads": (3, 3), **HD64}], ids=str)
def test_a_donated_cache_is_updated_in_place(platform, form, use_causal_mask):
    """`test_gpu_programs.py` shows that the program has no copy of the cache."""
    operands = packed_batch(MIXED, **form)
    layout = form.get("layout", "interleaved")
    program, others = lowered(operands, donate=True, use_causal_mask=use_causal_mask, kv_layout=layout)
    compiled = program.compile()
    kv_cache = jnp.array(operands["kv_cache"])
    address = kv_cache.unsafe_buffer_pointer()
    _, updated = compiled(kv_cache, others)
    assert kv_cache.is_deleted()
    assert updated.unsafe_buffer_pointer() == address


def test_vmap_is_one_call(platform):
    batches = [packed_batch(MIXED, seed=seed) for seed in range(3)]
    operands = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    attend = jax.jit(jax.vmap(lambda operands: ragged_paged_attention_v3(**operands, sm_scale=0.1)))
    assert custom_calls(attend.lower(operands).compile().as_text()) == ["xla_gpu_paged_attention_update"]
    for results, batch in zip(zip(*attend(operands), strict=True), batches, strict=True):
        expected, expected_cache = expected_results(**batch, sm_scale=0.1)
        np.testing.assert_allclose(results[0], expected, atol=2e-5)
        np.testing.assert_array_equal(results[1], expected_cache)


def test_it_runs_under_strict_promotion(platform):
    operands = packed_batch(MIXED, dtype="bfloat16", cache=E4M3, ragged=True)
    options = {"q_scale": 0.5, "k_scale": 0.5, "v_scale": 0.5, "attention_sink": 1.0}
    expected = run(operands, options)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        results = run(operands, options)
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.float32(result), np.float32(wanted))


@pytest.mark.parametrize("options", [{}, {"use_causal_mask": False}, {"cu_kv_lens": True}], ids=str)
def test_a_program_of_any_number_of_tokens_and_pages_is_exported(options):
    operands = packed_batch(MIXED, ragged="cu_kv_lens" in options)
    options = {name: x for name, x in options.items() if name != "cu_kv_lens"}
    tokens, pages = jax.export.symbolic_shape("t, p")
    sizes = {"kv_cache": pages} | dict.fromkeys(("queries", "keys", "values"), tokens)
    specs = {
        name: jax.ShapeDtypeStruct((sizes.get(name, x.shape[0]), *x.shape[1:]), x.dtype) for name, x in operands.items()
    }
    program = jax.jit(lambda operands: ragged_paged_attention_v3(**operands, kv_layout="interleaved", **options))
    checks = export_disabled_checks()
    exported = jax.export.export(program, platforms=["cpu", "cuda"], disabled_checks=checks)(specs)
    expected, expected_cache = expected_results(**operands, **options)
    out, cache = exported.call(operands)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_array_equal(cache, expected_cache)


# ---------- metadata


@pytest.mark.parametrize("use_causal_mask", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "change",
    [
        {"kv_lens": -3},
        {"kv_lens": 2**31 - 1},
        {"page": -1},
        {"page": 2**31 - 1},
        {"cu_q_lens": -1},
    ],
    ids=str,
)
def test_hostile_metadata_of_one_sequence_change_no_other(platform, change, use_causal_mask):
    operands = packed_batch(MIXED)
    # Otherwise work is divided according to the whole batch, and bits may differ.
    options = {"use_causal_mask": use_causal_mask, "batch_invariant": True}
    expected, expected_cache = run(operands, options)
    hostile, (name, value) = {key: x.copy() for key, x in operands.items()}, next(iter(change.items()))
    columns = len(hostile["page_indices"]) // len(hostile["kv_lens"])
    own = hostile["page_indices"][2 * columns : 3 * columns].copy()
    if name == "page":
        hostile["page_indices"][2 * columns : 3 * columns] = value
    else:
        hostile[name][2] = value
    out, cache = run(hostile, options)
    # Without its own start, the sequence has the rows of the one before.
    others = [0, *([] if name == "cu_q_lens" else range(1, 7)), 10]
    np.testing.assert_array_equal(out[others], expected[others])
    np.testing.assert_array_equal(out[11:], 0)
    pages = np.setdiff1d(np.arange(len(cache)), own)
    if name == "cu_q_lens":
        pages = np.setdiff1d(pages, hostile["page_indices"][columns : 2 * columns])
    np.testing.assert_array_equal(cache[pages], expected_cache[pages])


@pytest.mark.parametrize("count", [0, -4, 3, 99])
def test_the_number_of_sequences_is_clamped(platform, count):
    operands = packed_batch(MIXED, spare_slots=0)
    operands["distribution"] = np.int32([0, 0, count])
    out, cache = run(operands, {})
    operands["distribution"][2] = np.clip(count, 0, len(MIXED))
    expected, expected_cache = expected_results(**operands)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_array_equal(cache, expected_cache)


@pytest.mark.parametrize("sizes", [{"kv_lens": 0}, {"kv_cache": 0}, {"queries": 0}, {"page_indices": 0}], ids=str)
def test_empty_operands(platform, sizes):
    operands = packed_batch([(1, 3)], spare_slots=0)
    name = next(iter(sizes))
    cut = {"kv_lens": ["kv_lens", "page_indices"], "queries": ["queries", "keys", "values"]}.get(name, [name])
    operands |= {x: operands[x][:0] for x in cut}
    if name == "kv_lens":
        operands["cu_q_lens"] = operands["cu_q_lens"][:1]
    for causal in (True, False):
        out, cache = run(operands, {"use_causal_mask": causal})
        np.testing.assert_array_equal(out, np.zeros(operands["queries"].shape))
        np.testing.assert_array_equal(cache, operands["kv_cache"])


# ---------- arguments


def test_tuning_arguments_are_ignored(platform):
    operands = packed_batch(MIXED)
    blocks = {f"{case}_block_sizes": (3, 5, 7, 2) for case in "dpm"}
    numbers = dict.fromkeys(("num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes"), 3)
    flags = {"debug_mode": True, "disable_bounds_checks": False, "disable_semaphore_checks": False}
    options = {"mask_value": -1.0, "chunk_prefill_size": 2, "softmax_dtype": np.float32, **blocks, **numbers, **flags}
    for tuned, plain in zip(run(operands, options), run(operands, {}), strict=True):
        np.testing.assert_array_equal(tuned, plain)
    noncausal = {"use_causal_mask": False}
    pairs = zip(run(operands, {**noncausal, "skip_kv_mask": True}), run(operands, noncausal), strict=True)
    for hinted, plain in pairs:
        np.testing.assert_array_equal(hinted, plain)


def test_positional_arguments_have_the_order_of_tpu_inference():
    parameters = inspect.signature(ragged_paged_attention_v3).parameters.values()
    names = [x.name for x in parameters if x.kind is not inspect.Parameter.KEYWORD_ONLY]
    tokens, metadata = "queries keys values kv_cache", "kv_lens page_indices cu_q_lens distribution attention_sink"
    assert names == f"{tokens} {metadata}".split()


def test_the_result_may_have_fewer_bits_than_f32_queries(platform):
    operands = packed_batch(MIXED)
    out, _ = run(operands, {"out_dtype": jnp.bfloat16})
    expected, _ = run(operands, {})
    np.testing.assert_array_equal(out, expected.astype(ml_dtypes.bfloat16))


ONE_HEAD = packed_batch([(1, 3)], heads=(2, 1), d=64, dtype="bfloat16")
REFUSALS = [
    ({"custom_mask": np.ones(4)}, ValueError, "custom_mask is given with use_causal_mask, expected one of them"),
    ({"q_max": 4}, ValueError, "q_max is 4, expected None without custom_mask"),
    ({"xai_temperature_len": 1024.0}, NotImplementedError, "xai_temperature_len is 1024.0, expected None"),
    ({"softmax_dtype": jnp.bfloat16}, NotImplementedError, "softmax_dtype is bfloat16, expected None or float32"),
    ({"skip_kv_mask": True}, ValueError, "skip_kv_mask is True, expected False with use_causal_mask"),
    ({"soft_cap": 0.0}, ValueError, "soft_cap is 0.0, expected finite and > 0, or None"),
    ({"soft_cap": jnp.float32}, TypeError, "soft_cap is .*, expected a number"),
    ({"sliding_window": 0}, ValueError, "sliding_window is 0, expected >= 1"),
    ({"sliding_window": 2.5}, TypeError, "sliding_window is 2.5, expected an integer"),
    ({"sm_scale": 0.0}, ValueError, "sm_scale is 0.0, expected finite and > 0"),
    ({"sm_scale": 0.5, "k_scale": -1.0}, ValueError, r"sm_scale \* k_scale is -0.5"),
    ({"sm_scale": np.ones(3)}, ValueError, r"sm_scale has shape \[3\], expected one number"),
    ({"v_scale": np.ones(3)}, ValueError, r"v_scale has shape \[3\], expected one number or \[Hkv=2\]"),
    ({"attention_sink": np.ones(3)}, ValueError, r"attention_sink has shape \[3\], expected \[Hq=8\]"),
    ({"out_dtype": jnp.float8_e5m2}, NotImplementedError, "out_dtype is float8_e5m2, expected float32 or"),
    ({"pages_per_seq": 3}, ValueError, "pages_per_seq is 3, expected None without cu_kv_lens"),
    ({"kv_layout": "stacked"}, ValueError, "kv_layout is 'stacked', expected 'interleaved' or 'concatenated'"),
    ({"kv_layout": "concatenated"}, ValueError, "keys has head dimension 128, expected 64"),
    ({"use_causal_mask": 1}, TypeError, "use_causal_mask is 1, expected True or False"),
    ({"kv_cache": np.zeros((9, 4, 4, 128), np.float32)}, ValueError, "paged_attention_update takes a cache"),
    ({"kv_cache": np.zeros((9, 4, 2, 1, 128), np.float32)}, ValueError, r"to be \[4, 1, 128\] \(interleaved: "),
    ({"kv_cache": np.zeros((9, 4, 4, 1, 64), np.float32)}, ValueError, "expected its last dimensions to be"),
    ({"kv_cache": jnp.zeros((9, 4, 2, 2, 128), jnp.bfloat16)}, ValueError, "keys has dtype float32, expected bfloat16"),
    ({"queries": np.zeros((4, 128))}, ValueError, r"queries has shape \[4, 128\], expected \[T, Hq, D\]"),
    ({"keys": np.zeros((4, 2, 64))}, ValueError, r"keys has shape \[4, 2, 64\], expected \[T=14, Hkv, D=128\]"),
    ({"values": np.zeros((14, 1, 128))}, ValueError, r"values has shape \[14, 1, 128\], expected that of keys"),
    ({"kv_lens": np.zeros((2, 3), int)}, ValueError, r"kv_lens has shape \[2, 3\], expected \[S\]"),
    ({"kv_lens": np.zeros(6)}, TypeError, "kv_lens has dtype float64, expected integers"),
    ({"cu_q_lens": np.zeros(6, int)}, ValueError, r"cu_q_lens has shape \[6\], expected \[S \+ 1 = 7\]"),
    ({"cu_kv_lens": np.zeros(6, int)}, ValueError, r"cu_kv_lens has shape \[6\], expected \[S \+ 1 = 7\]"),
    ({"distribution": np.zeros(1, int)}, ValueError, r"distribution has shape \[1\], expected \[3\]"),
    ({"page_indices": np.zeros((6, 2), int)}, ValueError, r"page_indices has shape \[6, 2\], expected it to be flat"),
    ({"page_indices": np.zeros(7, int)}, ValueError, "expected a multiple of S = 6, or cu_kv_lens"),
    (ONE_HEAD, ValueError, "fits both layouts: pass kv_layout"),
]


@pytest.mark.parametrize(("change", "error", "text"), REFUSALS, ids=[text for _, _, text in REFUSALS])
def test_refusals(change, error, text):
    operands = {**packed_batch(MIXED), **change}
    with pytest.raises(error, match=f"(ragged_paged_attention_v3: |^).*{text}"):
        ragged_paged_attention_v3(**operands)


def test_a_soft_cap_cannot_be_traced():
    with pytest.raises(TypeError, match="soft_cap is traced, expected a number that is known when"):
        run({**packed_batch(MIXED), "soft_cap": np.float32(2)}, {})


def test_dtypes_without_a_kernel():
    operands = packed_batch(MIXED, dtype="float32", cache=E4M3)
    with pytest.raises(NotImplementedError, match="f32 queries over f32"):
        run(operands, {"q_scale": 0.5})
    rows = dict.fromkeys(("keys", "values"), np.zeros((14, 2, 128), np.int8))
    with pytest.raises(NotImplementedError, match="kv_cache has dtype int8, expected"):
        run({**operands, **rows, "kv_cache": np.zeros((9, 4, 1, 4, 128), np.int8)}, {})


# ---------- sglang-jax


@pytest.mark.parametrize("options", [{}, {"causal": 0}, {"attention_sink": SINKS, "sliding_window": 5}], ids=str)
def test_sglang_jax_has_another_order_of_arguments(platform, options):
    operands = packed_batch(MIXED, ragged=True, d=64)
    metadata = (operands[name] for name in ("kv_lens", "page_indices", "cu_q_lens", "cu_kv_lens", "distribution"))
    arrays = *(operands[name] for name in ("queries", "keys", "values", "kv_cache")), *metadata
    options = {**options}
    sinks, causal = options.get("attention_sink"), options.pop("causal", 1)
    options.pop("attention_sink", None)
    more = {"causal": causal, "softmax_dtype": None, "xai_temperature_len": None, "mask_aligned_to_cu_kv": False}
    out, cache = sglang_jax.ragged_paged_attention_v3(*arrays, None, sinks, m_block_sizes=None, **more, **options)
    expected = expected_results(**operands, attention_sink=sinks, use_causal_mask=bool(causal), **options)
    np.testing.assert_allclose(out, expected[0], atol=2e-5)
    np.testing.assert_array_equal(cache, expected[1])


@pytest.mark.parametrize(
    ("function", "module", "name"),
    [(sglang_jax.install, "sgl_jax", "sglang-jax"), (ejkernel.register, "ejkernel", "ejkernel")],
    ids=["sglang-jax", "ejkernel"],
)
def test_a_package_that_is_not_installed_is_named(monkeypatch, function, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"needs {name}, which is not installed"):
        function()
