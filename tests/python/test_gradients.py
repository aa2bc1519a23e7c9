"""Gradients of flash_attn_varlen and dot_product_attention in JAX, also under transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batches import varlen
from gradient_cases import CASES, gradient_case
from subprocesses import python
from test_dot_product_attention import tensors
from xla_attention.jax import dot_product_attention, export_disabled_checks, flash_attn_varlen


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_c_interface(platform, name):
    case = gradient_case(name)
    q, k, v, *starts = case.operands
    others = {name: case.options[name] for name in ("sinks", "bias") if name in case.options}
    constant = {name: x for name, x in case.options.items() if name not in others}

    def total(q, k, v, *values):
        others_of_call = dict(zip(others, values, strict=True))
        out, lse = flash_attn_varlen(q, k, v, *starts, return_lse=True, **others_of_call, **constant)
        # The log-sum-exp of a row without keys is -inf, and 0 * -inf would be NaN.
        lse_total = 0 if case.dlse is None else jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) * case.dlse)
        return jnp.sum(out.astype(jnp.float32) * case.dout.astype(jnp.float32)) + lse_total

    case.check(jax.jit(jax.grad(total, range(3 + len(others))))(q, k, v, *others.values()))


@pytest.mark.parametrize(
    ("options", "attribute"),
    [
        ({}, "deterministic = false"),
        ({"deterministic": True}, "deterministic = true"),
        ({"max_seqlen_q": 8}, "max_seqlen_q = 8 : i64"),
        ({"max_seqlen_k": 16}, "max_seqlen_k = 16 : i64"),
    ],
    ids=str,
)
def test_options_that_change_no_result_are_in_the_program(options, attribute):
    operands, _ = varlen([(5, 9)], rows_after=0)
    total = jax.grad(lambda q: flash_attn_varlen(q, *operands[1:], **options).sum())
    (call,) = [line for line in jax.jit(total).lower(operands[0]).as_text().splitlines() if "varlen_bwd(" in line]
    assert attribute in call


def custom_calls(function, *arguments):
    """The number of calls of each of our targets in a program."""
    text = jax.jit(function).lower(*arguments).as_text()
    return {name: text.count(f"@xla_gpu_flash_attn_varlen{name}(") for name in ("", "_bwd")}


def gradient_call(attend, operands):
    q, k, v, *starts = operands
    dout = np.random.default_rng(7).standard_normal(jax.eval_shape(attend, *operands).shape, np.float32)
    return jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v, *starts) * dout), (0, 1, 2)), (q, k, v)


@pytest.mark.parametrize("options", [{"causal": True}, {"alibi_slopes": np.ones(8, np.float32)}], ids=str)
def test_vmap_becomes_part_of_the_batch(platform, options):
    operands, _ = varlen([(7, 9), (3, 12), (0, 4)], rows_after=3)
    attend = functools.partial(flash_attn_varlen, **options)
    gradient, (q, k, v) = gradient_call(attend, [jnp.nan_to_num(x) for x in operands])
    batched = [jnp.stack([x, 2 * x, x[::-1]]) for x in (q, k, v)]
    assert custom_calls(jax.vmap(gradient), *batched) == {"": 1, "_bwd": 1}
    expected = [gradient(*(x[i] for x in batched)) for i in range(3)]
    for actual, *each in zip(jax.vmap(gradient)(*batched), *expected, strict=True):
        np.testing.assert_allclose(actual, jnp.stack(each), atol=1e-5, rtol=1e-5)
    # Shared keys; then grad of vmap.
    shared = jax.vmap(gradient, in_axes=(0, None, None))(batched[0], k, v)
    for actual, *each in zip(shared, *(gradient(x, k, v) for x in batched[0]), strict=True):
        np.testing.assert_allclose(actual, jnp.stack(each), atol=1e-5, rtol=1e-5)
    total = jax.grad(lambda q: jnp.sum(jax.vmap(lambda q: attend(q, k, v, *operands[3:]))(q)))
    assert custom_calls(total, batched[0]) == {"": 1, "_bwd": 1}
    np.testing.assert_allclose(
        total(batched[0])[1], jax.grad(lambda q: attend(q, k, v, *operands[3:]).sum())(2 * q), atol=1e-5
    )


def test_batched_sinks_under_vmap(platform):
    operands, _ = varlen([(7, 9), (3, 12)], rows_after=0)

    def total(sinks):
        return jnp.sum(flash_attn_varlen(*operands, sinks=sinks) ** 2)

    sinks = jnp.linspace(-1, 2, 24).reshape(3, 8)
    actual = jax.vmap(jax.grad(total))(sinks)
    np.testing.assert_allclose(actual, jnp.stack([jax.grad(total)(x) for x in sinks]), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"local_window_size": (5, 2), "scale": 0.3},
        {"query_seq_lengths": jnp.array([17, 3, 9])},
    ],
    ids=str,
)
def test_dot_product_attention_has_the_gradients_of_jax_nn(platform, options):
    operands = tensors()

    def total(attend, *operands):
        out = attend(*operands, **options)
        if "query_seq_lengths" in options:  # JAX gives the mean of the values to rows that are padding
            out = jnp.where((jnp.arange(17) < options["query_seq_lengths"][:, None])[..., None, None], out, 0)
        return jnp.sum(jnp.sin(out))

    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.grad(functools.partial(total, jax.nn.dot_product_attention), (0, 1, 2)))(*operands)
    actual = jax.jit(jax.grad(functools.partial(total, dot_product_attention), (0, 1, 2)))(*operands)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)
    many = [jnp.stack([x, 2 * x]) for x in operands]
    together = jax.vmap(lambda *x: dot_product_attention(*x, **options))(*many)
    np.testing.assert_allclose(together[1], dot_product_attention(*(2 * x for x in operands), **options), atol=1e-5)


def test_rematerialisation_and_scan_keep_the_gradients(platform):
    operands, _ = varlen([(20, 45), (1, 80)], heads=(4, 4), rows_after=0)
    q, k, v, *starts = operands

    def layers(q, wrap):
        step = wrap(lambda x, _: (flash_attn_varlen(x, k, v, *starts, causal=True), None))
        return jnp.sum(jax.lax.scan(step, q, None, length=3)[0] ** 2)

    plain, again = (
        jax.jit(jax.grad(functools.partial(layers, wrap=wrap)))(q) for wrap in (lambda f: f, jax.checkpoint)
    )
    np.testing.assert_allclose(again, plain, atol=1e-6)


LOADER = """
import sys, jax, numpy as np
import xla_attention.jax
with jax.default_device(jax.devices(sys.argv[3])[0]):
    operands = [x for _, x in sorted(np.load(sys.argv[2]).items())]
    exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
    np.savez(sys.argv[2], *exported.call(*operands))
"""


def test_an_exported_training_step_of_any_size_runs_in_a_fresh_process(platform, tmp_path):
    rows, slots = jax.export.symbolic_shape("t, b")
    floats = [jax.ShapeDtypeStruct((rows, heads, 64), jnp.float32) for heads in (4, 2, 2)]

    def step(q, k, v, starts):
        def total(q, k, v):
            out, lse = flash_attn_varlen(q, k, v, starts, causal=True, return_lse=True)
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse)

        return jax.grad(total, (0, 1, 2))(q, k, v)

    exported = jax.export.export(jax.jit(step), platforms=["cpu", "cuda"], disabled_checks=export_disabled_checks())(
        *floats, jax.ShapeDtypeStruct((slots,), jnp.int32)
    )
    (q, k, v, starts, _), _ = varlen([(n, n) for n in (5, 17)], heads=(4, 2), rows_after=0)
    program, numbers = tmp_path / "step", tmp_path / "numbers.npz"
    program.write_bytes(exported.serialize())
    np.savez(numbers, *map(np.asarray, (q, k, v, starts)))
    python("-c", LOADER, program, numbers, platform)
    actual = np.load(numbers)
    for name, expected in zip(("arr_0", "arr_1", "arr_2"), step(q, k, v, starts), strict=True):
        np.testing.assert_array_equal(actual[name], expected)


def test_forward_mode_is_refused():
    operands, _ = varlen([(5, 9)], rows_after=0)
    q, *rest = operands
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: flash_attn_varlen(q, *rest), (q,), (q,))


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ({"pages": 4}, {}, "there is no gradient through keys in pages; pass packed keys"),
        ({"pages": 4, "kv_layout": "stacked"}, {}, "there is no gradient through keys in pages"),
        ({}, {"v_scale": 2.0}, "of a call with q_scale, k_scale or v_scale; multiply q, k or v, or softmax_scale"),
        ({"dtype": "float8_e4m3fn"}, {}, "there is no gradient of float8_e4m3fn; there are gradients of f32"),
    ],
)
def test_unsupported_gradients_are_an_error(shape, options, text):
    operands, lengths = varlen([(5, 9)], rows_after=0, **shape)
    q, *rest = operands
    with pytest.raises(NotImplementedError, match=f"^flash_attn_varlen: .*{text}"):
        jax.vjp(lambda q: flash_attn_varlen(q, *rest, **lengths, **options), q)


def test_a_gradient_of_alibi_slopes_is_an_error_unless_they_are_constants():
    operands, _ = varlen([(5, 9)], rows_after=0)

    def total(slopes):
        return flash_attn_varlen(*operands, alibi_slopes=slopes).sum()

    with pytest.raises(NotImplementedError, match="there is no gradient of alibi_slopes"):
        jax.grad(total)(jnp.ones(8))
    assert (jax.grad(lambda slopes: total(jax.lax.stop_gradient(slopes)))(jnp.ones(8)) == 0).all()


def test_an_output_of_f32_is_differentiable():
    (q, k, v, starts, _), _ = varlen([(3, 3), (4, 4)], dtype="bfloat16", rows_after=0)

    def attend(out_dtype, *leaves):
        return flash_attn_varlen(*leaves, starts, causal=True, out_dtype=out_dtype)

    (wide, pull_wide), (narrow, pull) = (jax.vjp(functools.partial(attend, x), q, k, v) for x in (jnp.float32, None))
    assert wide.dtype == jnp.float32
    assert jnp.allclose(wide, narrow, rtol=2**-6, atol=2**-6)
    for grad, expected in zip(pull_wide(jnp.ones_like(wide)), pull(jnp.ones_like(narrow)), strict=True):
        assert grad.dtype == jnp.bfloat16
        assert jnp.allclose(grad, expected, rtol=2**-5, atol=2**-5)
