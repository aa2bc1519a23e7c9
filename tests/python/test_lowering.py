"""What our functions become in StableHLO and in the compiled program."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from stablehlo import stablehlo_of
from xla_attention.jax import (
    kv_cache_update,
    paged_attention,
    paged_attention_update,
    rope_kv_cache_update,
    simple_add,
)

QUERY = jax.ShapeDtypeStruct((4, 4, 64), jnp.float32)
CACHE = jax.ShapeDtypeStruct((8, 16, 4, 64), jnp.float32)
I32 = {n: jax.ShapeDtypeStruct(n, jnp.int32) for n in [(2,), (2, 3), (3,), (1,), (4,)]}


def attention(query, kv_cache, lens, tables, loc, n):
    return paged_attention(query, kv_cache, lens, tables, loc, n, scale=0.125, sliding_window=5)


def lowered(function, *arguments):
    return jax.jit(function).lower(*arguments).as_text()


def test_paged_attention_is_a_typed_custom_call_with_typed_attributes():
    text = stablehlo_of(jax.jit(attention).lower(QUERY, CACHE, I32[2,], I32[2, 3], I32[3,], I32[1,]))
    (line,) = (line for line in text.splitlines() if "stablehlo.custom_call" in line)
    assert "stablehlo.custom_call @xla_gpu_paged_attention(" in line
    assert "api_version = 4 : i32" in line
    attributes = re.search(r"backend_config = \{([^}]*)\}", line)[1]
    assert set(attributes.split(", ")) == {
        "batch_invariant = false",
        "scale = 1.250000e-01 : f32",
        "sliding_window = 5 : i64",
        "soft_cap = 0.000000e+00 : f32",
    }


def test_layouts_are_row_major():
    text = lowered(simple_add, *[jax.ShapeDtypeStruct((2, 3), jnp.float32)] * 2)
    assert "operand_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]> : tensor<2xindex>]" in text


def test_transposed_operands_arrive_row_major(platform):
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.ones((3, 2))
    assert (jax.jit(lambda a, b: simple_add(a.T, b))(a, b) == a.T + b).all()


def test_the_cache_aliases_its_operand():
    rows = jax.ShapeDtypeStruct((4, 2, 64), jnp.float32)
    text = lowered(kv_cache_update, CACHE, rows, rows, I32[4,])
    assert re.search(r"output_operand_aliases = \[#stablehlo.output_operand_alias<.*operand_index = 0", text)


def test_the_cache_of_a_rotating_update_aliases_its_operand():
    query, rows = (jax.ShapeDtypeStruct((4, heads, 64), jnp.float32) for heads in (4, 2))
    table = jax.ShapeDtypeStruct((9, 32), jnp.float32)
    text = lowered(rope_kv_cache_update, CACHE, query, rows, rows, I32[4,], I32[4,], table)
    (alias,) = re.findall(r"#stablehlo.output_operand_alias<([^>]*)>", text)
    assert "output_tuple_indices = [0], operand_index = 0" in alias
    assert "interleaved = false, kv_layout = 1 : i64" in text


def test_the_cache_of_an_update_with_attention_aliases_its_operand_and_a_donated_one_its_argument():
    rows = jax.ShapeDtypeStruct((4, 2, 64), jnp.float32)
    operands = (QUERY, CACHE, I32[2,], I32[2, 3], I32[3,], I32[1,], rows, rows, I32[4,])
    step = functools.partial(paged_attention_update, scale=0.125, return_lse=True)
    text = lowered(step, *operands)
    (alias,) = re.findall(r"#stablehlo.output_operand_alias<([^>]*)>", text)
    assert "output_tuple_indices = [1], operand_index = 1" in alias
    compiled = jax.jit(step, donate_argnums=1).lower(*operands).compile().as_text()
    assert "input_output_alias={ {2}: (1, {}, may-alias) }" in compiled
    assert "output_to_operand_aliasing={{1}: (1, {})}" in compiled
    # The cache is the third result, in its argument's own memory.
    assert not re.search(r"= f32\[8,16,4,64\]\S* copy\(", compiled)


def test_no_host_callback_is_left_in_the_program():
    text = lowered(attention, QUERY, CACHE, I32[2,], I32[2, 3], I32[3,], I32[1,])
    assert "callback" not in text


@pytest.mark.parametrize("scale", [1, 1.0])
def test_attributes_keep_their_type_whatever_python_type_was_given(scale):
    def scaled(*operands):
        return paged_attention(*operands, scale=scale)

    text = lowered(scaled, QUERY, CACHE, I32[2,], I32[2, 3], I32[3,], I32[1,])
    assert "scale = 1.000000e+00 : f32" in text


def test_export_to_cuda_needs_no_gpu():
    check = jax.export.DisabledSafetyCheck.custom_call("xla_gpu_simple_add")
    one = jax.ShapeDtypeStruct((3,), jnp.float32)
    exported = jax.export.export(jax.jit(simple_add), platforms=["cuda"], disabled_checks=[check])(one, one)
    assert "xla_gpu_simple_add" in exported.mlir_module()


def test_export_takes_a_symbolic_number_of_rows():
    check = jax.export.DisabledSafetyCheck.custom_call("xla_gpu_simple_add")
    (n,) = jax.export.symbolic_shape("n")
    one = jax.ShapeDtypeStruct((n, 4), jnp.float32)
    exported = jax.export.export(jax.jit(simple_add), disabled_checks=[check])(one, one)
    assert (exported.call(jnp.ones((5, 4)), jnp.ones((5, 4))) == 2).all()
