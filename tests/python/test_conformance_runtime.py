"""The targets in a runtime: layouts, donation, order of effects, errors beside work in flight, threads, registration.

The calls come from the tables of tests/conformance.
"""

import collections
import concurrent.futures
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from conformance_calls import assert_outcome, by_ffi_call, by_stablehlo, ffi_call, stablehlo_text
from conformance_table import cases, ffi_header_errors
from stablehlo import Program
from subprocesses import python
from xla_attention.jax._register import register_targets


def case_of(target, name="the valid call"):
    return next(case for case in cases() if (case.target, case.name) == (target, name))


def valid_calls():
    return [case for case in cases() if case.name == "the valid call"]


ADD = case_of("xla_gpu_simple_add")
INVALID_ADD = case_of("xla_gpu_simple_add", "b f32[3,2]")
A = np.arange(6, dtype=np.float32).reshape(2, 3)
ZERO = np.zeros((2, 3), np.float32)


def with_layouts(a, b, out):
    """The add as text with layouts, minor dimension first."""
    dense = [f"dense<[{order}]> : tensor<2xindex>" for order in (a, b, out)]
    return stablehlo_text(ADD, extra=f", operand_layouts = [{dense[0]}, {dense[1]}], result_layouts = [{dense[2]}]")


ROWS, COLUMNS = "1, 0", "0, 1"
# XLA may implement the transposition as a change of layout, without a copy.
TRANSPOSED = """
module @m { func.func public @main(%%a: tensor<3x2xf32>, %%b: tensor<2x3xf32>) -> tensor<2x3xf32> {
  %%t = stablehlo.transpose %%a, dims = [1, 0] : (tensor<3x2xf32>) -> tensor<2x3xf32>
  %%0 = stablehlo.custom_call @xla_gpu_simple_add(%%t, %%b) {api_version = 4 : i32%s} :
    (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>
  return %%0 : tensor<2x3xf32> } }
"""


class TestLayouts:
    def test_the_text_may_specify_the_row_major_layout(self, platform):
        (out,) = Program(with_layouts(ROWS, ROWS, ROWS), platform)(A, ZERO)
        np.testing.assert_array_equal(out, A)

    def test_a_transposed_value_is_copied_to_the_layout_in_the_text(self, platform):
        rows = f"dense<[{ROWS}]> : tensor<2xindex>"
        layouts = f", operand_layouts = [{rows}, {rows}], result_layouts = [{rows}]"
        (out,) = Program(TRANSPOSED % layouts, platform)(np.ascontiguousarray(A.T), ZERO)
        np.testing.assert_array_equal(out, A)

    def test_a_gpu_passes_a_transposed_value_uncopied_without_a_layout_in_the_text(self, platform):
        (out,) = Program(TRANSPOSED % "", platform)(np.ascontiguousarray(A.T), ZERO)
        np.testing.assert_array_equal(out, A if platform == "cpu" else A.T.reshape(2, 3))

    def test_a_column_major_argument_is_copied_to_row_major(self, platform):
        device = jax.sharding.SingleDeviceSharding(jax.devices(platform)[0])
        column_major = Format(Layout((1, 0)), device)
        a = jax.device_put(A, column_major)
        (out,) = jax.jit(ffi_call(ADD), in_shardings=(column_major, device))(a, ZERO)
        np.testing.assert_array_equal(out, A)

    def test_column_major_layouts_in_the_text_are_kept(self, platform):
        # The FFI passes no layouts, so that no handler can reject one: the caller has to request row-major, as
        # jax.ffi.ffi_call does by default. An elementwise sum is right if all buffers have the same layout.
        (out,) = Program(with_layouts(COLUMNS, COLUMNS, COLUMNS), platform)(A, ZERO)
        np.testing.assert_array_equal(out, A)
        (out,) = Program(with_layouts(COLUMNS, ROWS, ROWS), platform)(A, ZERO)
        np.testing.assert_array_equal(out, A.T.reshape(2, 3))


class TestMemory:
    def test_calls_work_after_an_error_with_a_donated_operand(self, platform):
        case = case_of("xla_gpu_kv_cache_update", "value f32[6,2,16]")
        operands = [jax.device_put(b.array(), jax.devices(platform)[0]) for b in case.operands]
        call = jax.jit(ffi_call(case, in_place=True), donate_argnums=0)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"value has dtype f32, expected f16"):
            jax.block_until_ready(call(*operands))
        after = by_ffi_call(case_of("xla_gpu_kv_cache_update"), platform, in_place=True)
        assert case_of("xla_gpu_kv_cache_update").results[0].matches(after[0])


class TestOrder:
    def updated(self, cache, rows, slot):
        slots = jnp.full((1,), slot, jnp.int32)
        call = jax.ffi.ffi_call(
            "xla_gpu_kv_cache_update",
            jax.ShapeDtypeStruct(cache.shape, cache.dtype),
            has_side_effect=True,
            input_output_aliases={0: 0},
        )
        return call(cache, rows, rows, slots, kv_layout=np.int64(1))

    def test_reads_of_a_cache_are_ordered_with_in_place_writes(self, platform):
        def program(cache, rows):
            before = jax.ffi.ffi_call("xla_gpu_simple_add", jax.typeof(cache))(cache, cache)
            cache = self.updated(cache, rows, 0)
            between = jax.ffi.ffi_call("xla_gpu_simple_add", jax.typeof(cache))(cache, cache)
            cache = self.updated(cache, 2 * rows, 0)
            return before, between, cache

        cache, rows = jnp.full((1, 1, 4, 16), 3.0), jnp.full((1, 2, 16), 5.0)
        before, between, after = jax.jit(program, donate_argnums=0)(cache, rows)
        assert [float(x.min()) for x in (before, between, after)] == [6, 10, 10]
        assert [float(x.max()) for x in (before, between, after)] == [6, 10, 10]

    def test_a_call_with_a_side_effect_runs_although_its_results_are_unused(self, platform):
        operands = [b.array() for b in INVALID_ADD.operands]

        def unread(*operands):
            ffi_call(INVALID_ADD)(*operands)
            return operands[0]

        with pytest.raises(jax.errors.JaxRuntimeError, match=r"b has shape \[3, 2\]"):
            jax.block_until_ready(jax.jit(unread)(*operands))

    def test_a_call_without_side_effects_is_removed_if_its_results_are_unused(self, platform):
        operands = [b.array() for b in INVALID_ADD.operands]

        def unread(*operands):
            jax.ffi.ffi_call(INVALID_ADD.target, [jax.ShapeDtypeStruct((2, 3), jnp.float32)])(*operands)
            return operands[0]

        np.testing.assert_array_equal(jax.jit(unread)(*operands), operands[0])


class TestErrors:
    def test_errors_do_not_affect_other_work_in_flight(self, platform):
        @jax.jit
        def long(x):
            return jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ x), x)

        x = jnp.full((384, 384), 1e-3)
        expected = np.asarray(long(x))
        for _ in range(5):
            in_flight = [long(x) for _ in range(3)]
            assert_outcome(INVALID_ADD, platform, by_ffi_call)
            assert_outcome(ADD, platform, by_stablehlo)
            for result in in_flight:
                np.testing.assert_array_equal(result, expected)

    def test_a_program_works_after_one_that_failed_in_the_middle(self, platform):
        @jax.jit
        def program(a, b, wrong):
            a = jnp.tanh(a) @ jnp.ones((3, 3))
            (middle,) = ffi_call(INVALID_ADD)(a, wrong)
            return ffi_call(ADD)(middle, b)

        for _ in range(3):
            with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: xla_gpu_simple_add: b has shape"):
                jax.block_until_ready(program(A, ZERO, ZERO.reshape(3, 2)))
            np.testing.assert_array_equal(jax.jit(ffi_call(ADD))(A, ZERO)[0], A)


class TestThreads:
    def test_valid_and_invalid_calls_from_many_threads(self, platform):
        calls = valid_calls() + ffi_header_errors()
        barrier = threading.Barrier(8)

        def work(offset):
            barrier.wait()
            for step in range(len(calls)):
                case = calls[(offset * 7 + step) % len(calls)]
                assert_outcome(case, platform, by_ffi_call if (offset + step) % 2 else by_stablehlo)
            return True

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))


TWO_DEVICES = """
import sys, threading
import jax, jax.numpy as jnp, numpy as np
import xla_attention.jax
from subprocesses import python
from conformance_calls import error_text, ffi_call, reported_error
from conformance_table import cases
platform = sys.argv[1]
devices = jax.devices(platform)[:2]
assert len(devices) == 2
valid = [case for case in cases() if case.name == "the valid call"]
invalid = next(case for case in cases() if case.name == "b f32[3,2]")
failures = []
def on(device):
    with jax.enable_x64(True):
        for _ in range(3):
            for case in valid:
                operands = [jax.device_put(b.array(), device) for b in case.operands]
                results = jax.jit(ffi_call(case))(*operands)
                for expected, actual in zip(case.results, results, strict=True):
                    if actual.devices() != {device} or not expected.matches(np.asarray(actual)):
                        failures.append((device, case.target))
            try:
                operands = [jax.device_put(b.array(), device) for b in invalid.operands]
                jax.block_until_ready(jax.jit(ffi_call(invalid))(*operands))
                failures.append((device, "no error"))
            except jax.errors.JaxRuntimeError as error:
                if error_text(error) != reported_error(platform, invalid):
                    failures.append((device, str(error)))
threads = [threading.Thread(target=on, args=(device,)) for device in devices]
[thread.start() for thread in threads], [thread.join() for thread in threads]
mesh = jax.sharding.Mesh(devices, "x")
spec = jax.sharding.PartitionSpec("x")
add = lambda a, b: jax.ffi.ffi_call("xla_gpu_simple_add", jax.ShapeDtypeStruct(a.shape, a.dtype))(a, b)
halves = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
a = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, spec))
out = halves(a, a)
assert (out == 2 * jnp.arange(8.0)).all() and len(out.sharding.device_set) == 2
print("failures", failures, "calls", len(valid))
"""


def test_calls_on_two_devices_in_parallel(platform):
    if platform == "gpu" and len(jax.devices("gpu")) < 2:
        pytest.skip("this machine has one GPU")
    done = python(
        "-c",
        TWO_DEVICES,
        platform,
        JAX_PLATFORMS="cpu" if platform == "cpu" else "",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        XLA_ATTENTION_LOG="debug",
    )
    assert done.stdout.strip() == f"failures [] calls {len(valid_calls())}", done.stderr
    loaded = collections.Counter(re.findall(r"loaded (\w+) for sm_", done.stdout + done.stderr))
    assert bool(loaded) == (platform == "gpu")
    assert set(loaded.values()) <= {2}, "a module is loaded once on each device"


def test_targets_may_be_registered_again(platform):
    register_targets.__wrapped__()
    assert ADD.results[0].matches(by_stablehlo(ADD, platform)[0])


def test_registering_another_handler_under_a_taken_name_fails():
    code = """
import ctypes, jax
import xla_attention.jax
from xla_attention import _library
rows = {(t.name, t.platform): t.execute for t in _library.targets()}
jax.devices("cpu")
handler = jax.ffi.pycapsule(ctypes.c_void_p(rows[b"xla_gpu_paged_attention", b"cpu"]))
try:
    jax.ffi.register_ffi_target("xla_gpu_simple_add", handler, platform="cpu")
except Exception as error:
    print(error)
"""
    done = python("-c", code)
    assert "Duplicate FFI handler registration" in done.stdout, done.stderr
