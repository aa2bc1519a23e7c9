"""Runs calls of context_parallel_attention on a mesh of devices; test_context_parallel_attention.py starts it.

    context_parallel_program.py cpu|gpu quick|slow [case ...]

Prints a line of JSON per case: for each result the largest error beside one device and beside attention in f64, the
relative errors in the norm (beside f64), the streams whose results have other bits in a second run, and those whose
results are not finite.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from context_parallel_cases import CASES, NUM_SEQS, PRODUCT, STREAMS, TOTAL, stream
from packed_attention import packed_attention, visible_keys
from xla_attention.jax import context_parallel_attention, flash_attn_varlen, inverse_zigzag_order, zigzag_order

ROWS, LSE, SAME = PartitionSpec("cp"), PartitionSpec(None, "cp"), PartitionSpec()


def operands_of(case):
    """q, k, v, the cotangents of the results, sinks and slopes."""
    rng = np.random.default_rng(5)
    heads, kv_heads = case.heads
    shapes = [(heads, 16), (kv_heads, 16), (kv_heads, case.value_dim), (heads, case.value_dim)]
    q, k, v, dout = (jnp.asarray(rng.standard_normal((TOTAL, *shape)), case.dtype) for shape in shapes)
    dlse = jnp.asarray(rng.standard_normal((heads, TOTAL)), jnp.float32)
    sinks = jnp.linspace(-1, 2, heads) if case.sinks else None
    slopes = np.float32(rng.uniform(0, 0.3, (NUM_SEQS, heads)))
    slopes = {"": None, "heads": slopes[0], "sequences": slopes}[case.slopes]
    return q, k, v, dout, dlse, sinks, slopes


def with_gradients(attend, case):
    """A function from q, k, v, starts, used rows, cotangents, sinks and slopes to the results and gradients."""

    def run(q, k, v, starts, used, dout, dlse, sinks, slopes):
        def results(q, k, v, sinks):
            return attend(q, k, v, starts, sinks=sinks, alibi_slopes=slopes, **({} if used is None else used))

        if case.dlse:
            primals, vjp = jax.vjp(results, q, k, v, sinks)
            cotangents = dout, dlse
        else:  # the log-sum-exp has no cotangent at all
            out, vjp, lse = jax.vjp(results, q, k, v, sinks, has_aux=True)
            primals, cotangents = (out, lse), dout
        return [x for x in (*primals, *vjp(cotangents)) if x is not None]

    return run


def on_one_device(case):
    """The call of flash_attn_varlen."""
    return functools.partial(flash_attn_varlen, return_lse=True, **case.options)


def shard_map(function, check_vma, **placing):
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, check_vma=check_vma, **placing)
    from jax.experimental.shard_map import shard_map

    return shard_map(function, check_rep=False, **placing)  # there is no replication rule for custom calls


def on_mesh(case, devices):
    """The call of context_parallel_attention within shard_map."""
    mesh = Mesh(np.array(devices), ("cp",))

    def attend(q, k, v, starts, *, seqused=None, **more):
        more = {"seqused": seqused, **more}
        more = {name: x for name, x in more.items() if x is not None}

        def on_device(q, k, v, starts, more):
            how = {"axis_name": "cp", "strategy": case.strategy, "layout": case.layout, "return_lse": True}
            return context_parallel_attention(q, k, v, starts, **how, **more, **case.options)

        specs = (ROWS, ROWS, ROWS, SAME, dict.fromkeys(more, SAME))
        program = shard_map(on_device, case.check_vma, mesh=mesh, in_specs=specs, out_specs=(ROWS, LSE))
        return program(q, k, v, starts, more)

    return attend


def run(case, devices):
    """The line of a case, without its name."""
    programs = [jax.jit(with_gradients(attend, case)) for attend in (on_one_device(case), on_mesh(case, devices))]
    q, k, v, dout, dlse, sinks, slopes = operands_of(case)
    names = ["out", "lse", "dq", "dk", "dv", "dsinks"]
    errors, norms, other_bits, not_finite = {}, {}, [], []
    for name in STREAMS[case.layout]:
        starts, used = stream(case, name)
        is_used = visible_keys(starts, used, TOTAL, causal=True, window=(-1, -1))[1] >= 0
        poisoned = [jnp.where(is_used[:, None, None], x, jnp.nan) for x in (q, k, v, dout)]
        poisoned.append(jnp.where(is_used, dlse, jnp.nan))
        order = back = np.arange(TOTAL)
        if case.layout == "zigzag":
            order, back = (f(starts, len(devices), total=TOTAL) for f in (zigzag_order, inverse_zigzag_order))
        # One device computes with the rows in the order of the stream.
        both_used = None if used is None else {"seqused_q": used, "seqused_k": used}
        one = programs[0](*poisoned[:3], starts, both_used, *poisoned[3:], sinks, slopes)
        arguments = [x[order] for x in poisoned[:4]]
        arguments = *arguments[:3], starts, used if used is None else {"seqused": used}, arguments[3]
        arguments = *arguments, poisoned[4][:, order], sinks, slopes
        runs = [jax.block_until_ready(programs[1](*arguments)) for _ in range(2)]
        if any(np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in zip(*runs, strict=True)):
            other_bits.append(name)
        cotangents = dout, dlse if case.dlse else 0 * dlse
        more = {"seqused": used, "sinks": sinks, "slopes": slopes, **case.options}
        exact = packed_attention(q, k, v, starts, *cotangents, **more)
        for i, (result, actual, single, expected) in enumerate(zip(names, runs[0], one, exact, strict=False)):
            actual, single = np.float64(actual), np.float64(single)
            actual = actual if i == 5 else actual[:, back] if i == 1 else actual[back]
            if i == 1:
                if not (np.isneginf(actual) == np.isneginf(expected)).all():
                    not_finite.append(f"{name}, {result}")
                actual, single, expected = (np.where(np.isneginf(x), 0, x) for x in (actual, single, expected))
            if not np.isfinite(actual).all():
                not_finite.append(f"{name}, {result}")
            size = max(1.0, np.abs(expected).max())
            error = [np.abs(actual - x).max() / size for x in (single, expected)]
            errors[result] = np.maximum(errors.get(result, 0), error).tolist()
            norm = [np.linalg.norm(x - expected) / max(np.linalg.norm(expected), 1e-9) for x in (actual, single)]
            norms.setdefault(name, {})[result] = norm
    return {"errors": errors, "norms": norms, "other_bits": other_bits, "not_finite": not_finite}


if __name__ == "__main__":
    platform, cases, *names = sys.argv[1:]
    devices = jax.devices(platform)
    devices = devices[: 4 if len(devices) >= 4 else 2]
    with jax.default_device(devices[0]):
        for name, case in {"quick": CASES, "slow": PRODUCT}[cases].items():
            if not names or name in names:
                print(json.dumps({"case": name} | run(case, devices[: case.devices])), flush=True)
