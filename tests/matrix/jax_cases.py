"""Cases of xla_attention.jax; for an unsupported JAX, that importing it reports this."""

import functools
import inspect
import json
import os
import pathlib
import subprocess
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np

import calls
import jaxlib_runtime
import old_handler
import stablehlo_cases
from case import Case, Skip, raises, run_at_once
from xla_attention import _library

GROUP = "functions"
JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


def runtime():
    """The runtime's name and version, and its FFI version."""
    versions = f"jax {jax.__version__}"
    if jax.lib.__version__ != jax.__version__:
        versions += f", jaxlib {jax.lib.__version__}"
    return versions, jaxlib_runtime.ffi_version()


def cases():
    """The cases for this JAX version."""
    if JAX_VERSION < (0, 5):
        yield from stablehlo_cases.cases(jaxlib_runtime.register_targets)
        yield Case("registration", "xla_attention.jax rejects this jax", _import_fails)
        yield Skip(GROUP, "xla_attention.jax needs jax >= 0.5 and says so")
        return
    import xla_attention.jax as xj

    yield from stablehlo_cases.cases(xj.register_targets)
    yield Case("registration", "a rejected handler is detected", _rejected_handler)
    from xla_attention.jax import _register

    if _register.accepted().version != _library.handler_sets()[-1].version:
        yield Case("registration", "the oldest handlers run too", _oldest_handlers)
    for name, call in calls.every_call().items():
        if call.has_64_bits:  # JAX drops them by default
            continue
        for how, wrap in (("eagerly", lambda f: f), ("jitted", jax.jit)):
            yield Case(GROUP, f"{name}, {how}", functools.partial(_run, xj, call, wrap))
        if call.updates:
            yield Case(GROUP, f"{name}, donated", functools.partial(_run_donated, xj, call))
    for name, test in _OTHERS.items():
        yield Case(GROUP, name, functools.partial(test, xj))


def _import_fails():
    with raises(ImportError, "xla_attention needs jax >= 0.5, this is " + jax.__version__):
        import xla_attention.jax  # noqa: F401


def _rejected_handler():
    from xla_attention.jax import _register

    error = _register.rejection(old_handler.TARGET)
    assert error is not None and "incompatible with the framework's API version" in error, error
    assert all(_register.rejection(t) is None for t in _register.accepted().targets if t.platform == b"cpu")
    newest = max(handler_set.version for handler_set in _library.compatible_sets(_register.runtime_ffi_version()))
    assert _register.accepted().version == newest, _register.accepted()


def _oldest_handlers():
    """In a subprocess without the other sets of handlers."""
    code = """
from xla_attention import _library
oldest = _library.handler_sets()[-1]
_library.handler_sets = lambda: [oldest]
import jax.numpy as jnp
from xla_attention.jax import _register, simple_add
assert _register.accepted() is oldest
print(simple_add(jnp.arange(3.0), jnp.arange(3.0)).tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[0.0, 2.0, 4.0]\n", done.stderr


def _run(xj, call, wrap):
    from jax_adapter import arrays_of  # which imports xla_attention.jax

    arrays = arrays_of(call)
    static = {name: x for name, x in call.arguments.items() if name not in arrays}
    function = wrap(lambda arrays: getattr(xj, call.function)(**arrays, **static))
    call.check(*map(np.asarray, calls.flatten(function(calls.tree_map(jnp.asarray, arrays)))))


def _run_donated(xj, call):
    """Each cache is updated in place."""

    def donating(function):
        def run(arrays):
            cache = jax.tree.map(lambda x: jax.block_until_ready(x.copy()), arrays.pop(call.updates))
            caches = jax.tree.leaves(cache)
            addresses = {x.unsafe_buffer_pointer() for x in caches}
            step = jax.jit(lambda cache, rest: function({call.updates: cache, **rest}), donate_argnums=0)
            actual = step(cache, arrays)
            assert all(x.is_deleted() for x in caches), "the cache was not donated"
            assert addresses <= {x.unsafe_buffer_pointer() for x in jax.tree.leaves(actual)}, "another buffer"
            return actual

        return run

    _run(xj, call, donating)


def _dot_product_attention(xj):
    """Against jax.nn.dot_product_attention."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 5, heads, 32)), jnp.float32) for heads in (4, 2, 2))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    for function in (xj.dot_product_attention, jax.jit(xj.dot_product_attention, static_argnames="is_causal")):
        np.testing.assert_allclose(function(q, k, v, is_causal=True), expected, atol=2e-5)


def _masks_and_segments(xj):
    """Against JAX's function with a mask: known, traced, promised, as segment ids, and through the fallback."""
    from xla_attention.flax import attention_fn

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 8, heads, 32)), jnp.float32) for heads in (4, 2, 2))
    ids = np.array([[4, 4, 4, 1, 1, 1, 1, 1], [3, 3, 5, 5, 5, 5, 2, 2]])
    causal = np.tril(np.ones((1, 1, 8, 8), bool))
    of_keys = (np.arange(8) % 3 < 2)[None, None, None]
    segments = (ids[:, :, None] == ids[:, None])[:, None]
    attend = jax.jit(xj.dot_product_attention, static_argnames=("is_causal", "mask_form", "fallback"))
    for mask, actual in {
        "known": (causal, lambda: xj.dot_product_attention(q, k, v, mask=causal)),
        "promised": (causal, lambda: attend(q, k, v, mask=causal, mask_form="causal")),
        "of keys": (of_keys, lambda: attend(q, k, v, mask=of_keys)),
        "segments": (segments & causal, lambda: attend(q, k, v, is_causal=True, segment_ids=ids)),
        "pair": (segments, lambda: attend(q, k, v, segment_ids=(ids, ids.copy()))),
        "fallback": (segments & of_keys, lambda: attend(q, k, v, mask=of_keys & segments, fallback="xla")),
        "Flax": (causal, lambda: jax.jit(lambda m: attention_fn(q, k, v, None, m, mask_form="causal"))(1.0 * causal)),
    }.values():
        np.testing.assert_allclose(actual(), jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(mask)), atol=2e-5)
    assert np.isnan(attend(q, k, v, segment_ids=np.where(ids == 2, 3, ids))).all((1, 2, 3)).tolist() == [False, True]


def _gradients(xj):
    """Against JAX's gradients, of one batch and under vmap."""
    rng = np.random.default_rng(1)
    operands = [jnp.asarray(rng.standard_normal((3, 2, 5, heads, 32)), jnp.float32) for heads in (4, 2, 2)]

    def gradients(attend):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x, is_causal=True))), (0, 1, 2))

    expected = jax.vmap(gradients(jax.nn.dot_product_attention))(*operands)
    actual = jax.jit(jax.vmap(gradients(xj.dot_product_attention)))(*operands)
    single = gradients(xj.dot_product_attention)(*(x[1] for x in operands))
    for a, b, c in zip(actual, single, expected, strict=True):
        np.testing.assert_allclose(a, c, atol=1e-4)
        np.testing.assert_allclose(b, c[1], atol=1e-4)


def _arguments(name):
    return calls.tree_map(jnp.asarray, calls.plain_calls()[name].arguments)


def _ragged_paged_attention(xj):
    arguments = _arguments("paged_attention: plain")
    operands = [arguments[name] for name in calls.PAGED]
    expected = xj.paged_attention(*operands, scale=0.25)
    for function in (xj.ragged_paged_attention, jax.jit(xj.ragged_paged_attention, static_argnames="sm_scale")):
        np.testing.assert_allclose(function(*operands, sm_scale=0.25), expected, atol=2e-5)


def _without_lse(xj):
    arguments = _arguments("flash_attn_varlen: plain")
    expected, _ = xj.flash_attn_varlen(**arguments)
    np.testing.assert_array_equal(xj.flash_attn_varlen(**{**arguments, "return_lse": False}), expected)


def _error_at_trace_time(xj):
    """The error at trace time, eagerly and in a jitted function."""
    arguments = _arguments("paged_attention: plain")
    tables = arguments.pop("block_tables")
    text = "xla_gpu_paged_attention: block_tables has shape [2, 4], expected [num_seqs=6, max_pages]"

    def step(tables):
        return xj.paged_attention(block_tables=tables, **arguments)

    with raises(ValueError, text):
        step(tables[:2])
    with raises(ValueError, text):
        jax.jit(step).trace(tables[:2])


UPDATE = "kv_cache_update: float32 interleaved plain"


def _scanned(xj):
    """A scan that carries the cache."""
    arguments = _arguments(UPDATE)
    cache, key, value = (arguments[name] for name in ("kv_cache", "key", "value"))
    slots = jnp.arange(32)

    @jax.jit
    def loop(cache):
        def step(cache, slot):
            return xj.kv_cache_update(cache, key[:1], value[:1], slot[None]), slot

        return jax.lax.scan(step, cache, slots)[0]

    actual = loop(cache)
    np.testing.assert_array_equal(actual[:, :, 0::2], np.broadcast_to(key[0], (8, 4, 2, 16)))


def _mapped(xj):
    a, b = (jnp.arange(12.0).reshape(3, 4) * factor for factor in (1, 10))
    np.testing.assert_array_equal(jax.vmap(xj.simple_add)(a, b), a + b)


def _mapped_pages(xj):
    """vmap over queries with a shared cache, and over caches."""
    for name, operand in (("paged_attention: plain", "query"), (UPDATE, "kv_cache")):
        arguments = _arguments(name)
        values = arguments.pop(operand)
        function = functools.partial(
            getattr(xj, name.partition(":")[0]),
            **{**arguments, "return_lse": False} if operand == "query" else arguments,
        )
        actual = jax.jit(jax.vmap(lambda x, f=function, o=operand: f(**{o: x})))(jnp.stack([values, 2 * values]))
        np.testing.assert_allclose(actual[1], function(**{operand: 2 * values}), atol=1e-6)


# A sample of tests/python/sharding_cases.py.
_SHARDED = (
    "packed, by heads",
    "packed, projected, two KV heads",
    "packed, shard_map over rows",
    "update, stacked",
    "paged update",
    "decode step",
)


def _sharded(_xj):
    """On four CPU devices, in a subprocess with that flag, and on each kind of mesh that this JAX has."""
    import sharding_cases

    program = pathlib.Path(sharding_cases.__file__).with_name("sharding_program.py")
    options = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    for partitioning in ("shardy", "explicit") if JAX_VERSION >= (0, 7) else ("gspmd",):
        names = [
            name for name in _SHARDED if partitioning != "explicit" or name not in sharding_cases.AUTOMATIC_AXES_ONLY
        ]
        command = [sys.executable, program, "cpu", partitioning, *names]
        done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": options}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert [row["case"] for row in rows] == names
        for row in rows:
            assert row["error"] < 2e-5 and row["in_place"] and not row["copies"], row
            assert set(row["collectives"]) == sharding_cases.EXPECTED_COLLECTIVES.get(row["case"], set()), row


# A sample of tests/python/context_parallel_cases.py: each strategy, and both layouts.
_CONTEXT_PARALLEL = ("all_gather, zigzag", "ring, full", "ring, zigzag", "all_to_all, few KV heads", "halo of 33")


def _context_parallel(_xj):
    """Attention and gradients over four CPU devices, in a subprocess as above."""
    import context_parallel_cases

    program = pathlib.Path(context_parallel_cases.__file__).with_name("context_parallel_program.py")
    options = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    command = [sys.executable, program, "cpu", "quick", *_CONTEXT_PARALLEL]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": options}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(row["case"] for row in rows) == sorted(_CONTEXT_PARALLEL)
    for row in rows:
        assert max(map(max, row["errors"].values())) < 5e-6 and not row["other_bits"] and not row["not_finite"], row


def _from_two_threads(xj):
    at_once = (calls.plain_calls()[name] for name in ("paged_attention: plain", UPDATE))
    run_at_once(*(functools.partial(_run, xj, call, jax.jit) for call in at_once))


def _from_eight_threads(xj):
    """Tracing, checks, errors and runs at once; Python without a global interpreter lock has to stay without it."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert not sys._is_gil_enabled(), "an import has enabled the global interpreter lock"
    valid = functools.partial(_run, xj, calls.plain_calls()[UPDATE], lambda function: function)
    run_at_once(*[valid, functools.partial(_error_at_trace_time, xj)] * 4)


def _arguments_of_jaxs(xj):
    """Every parameter of this JAX's dot_product_attention, with its default."""
    ours = inspect.signature(xj.dot_product_attention).parameters
    for name, parameter in inspect.signature(jax.nn.dot_product_attention).parameters.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name


def _no_gradient(xj):
    """Raised for a gradient that is needed, and for no other."""
    arguments = _arguments(UPDATE)
    rows = arguments.pop("key")

    def update(rows):
        return xj.kv_cache_update(key=rows, **arguments)

    with raises(NotImplementedError, "kv_cache_update: there is no gradient; "):
        jax.grad(lambda rows: update(rows).sum())(rows)
    gradient, _ = jax.grad(lambda rows: (rows.sum(), update(rows)), has_aux=True)(rows)
    np.testing.assert_array_equal(gradient, np.ones_like(rows))
    twice = jax.hessian(lambda x: (xj.simple_add(x, x) ** 2).sum())(jnp.ones(2))
    np.testing.assert_array_equal(twice, 8 * np.eye(2))


def _host_integers(xj):
    """Slots that would be valid if they were truncated to 32 bits."""
    arguments = _arguments(UPDATE)
    past = np.asarray(arguments.pop("slot_mapping"), np.int64) + 2**32
    for slots in (past, past.tolist()):
        np.testing.assert_array_equal(xj.kv_cache_update(slot_mapping=slots, **arguments), arguments["kv_cache"])


_OTHERS = {
    "dot_product_attention, eagerly and jitted": _dot_product_attention,
    "dot_product_attention has the arguments of JAX's": _arguments_of_jaxs,
    "masks and segment ids": _masks_and_segments,
    "unsupported gradients": _no_gradient,
    "host integers do not wrap": _host_integers,
    "gradients, also under vmap": _gradients,
    "ragged_paged_attention, eagerly and jitted": _ragged_paged_attention,
    "flash_attn_varlen without lse": _without_lse,
    "an error at trace time": _error_at_trace_time,
    "kv_cache_update in a scan": _scanned,
    "simple_add under vmap": _mapped,
    "pages under vmap": _mapped_pages,
    "sharded over four devices": _sharded,
    "context-parallel over four devices": _context_parallel,
    "two calls from two threads": _from_two_threads,
    "valid and invalid calls from eight threads": _from_eight_threads,
}
