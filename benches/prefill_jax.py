"""Prefill in JAX against other libraries on one GPU.

`make bench ARGS="prefill_jax.py word ..."` runs the cases with one of the words in their name. Results are compared
before anything is timed. Libraries run in interleaved rounds, each of several calls of a jitted function. The last line
has all results as JSON.
"""

import functools
import json
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import xla_attention.jax as xa
from peers import agreeing_calls, available, report_failure
from prefill_cases import CASES

ROUNDS = 7
CALLS = 10
PAUSE_SECONDS = 0.1


def starts(lens):
    """cu_seqlens of lengths."""
    return jnp.asarray(np.concatenate([[0], np.cumsum(lens)]), jnp.int32)


def is_dense(case):
    """Whether all sequences have one length, and as many keys as queries."""
    return not case.is_ragged() and case.q_lens == case.lens


def over_batch(case, call):
    """A call over q, k and v `[batch, tokens, heads, D]` as one over packed sequences."""
    return lambda *operands: call(*(x.reshape(len(case.lens), -1, *x.shape[1:]) for x in operands))


def flash_attn3_jax(case, cu_q, cu_k):
    """FA3 by flash-attn3-jax, on packed sequences, because its gradients of a batch without a mask are NaN."""
    from flash_attn3_jax import flash_mha_varlen

    options = {"is_causal": case.causal, "max_seqlen_q": max(case.q_lens), "max_seqlen_k": max(case.lens)}
    return lambda q, k, v: flash_mha_varlen(q, k, v, cu_q, cu_k, **options)


def dew_flash_attn(case, cu_q, cu_k):
    """FA3 by dew-flash-attn, on a batch where lengths are equal, which is faster."""
    from dew_flash_attn import flash_mha, flash_mha_varlen

    if is_dense(case):
        return over_batch(case, functools.partial(flash_mha, is_causal=case.causal))
    keys = {} if case.q_lens == case.lens else {"key_cu_seqlens": cu_k, "key_max_seqlen": max(case.lens)}
    return lambda q, k, v: flash_mha_varlen(q, k, v, cu_q, max(case.q_lens), is_causal=case.causal, **keys)


def cudnn(case, _cu_q, _cu_k):
    """cuDNN by jax.nn, on sequences of one length."""
    if not is_dense(case):
        return None
    options = {"is_causal": case.causal, "implementation": "cudnn"}
    return over_batch(case, functools.partial(jax.nn.dot_product_attention, **options))


def tokamax(case, _cu_q, _cu_k):
    """Tokamax's Mosaic kernels, on sequences of one length."""
    if not is_dense(case):
        return None
    from tokamax import dot_product_attention

    return over_batch(case, functools.partial(dot_product_attention, is_causal=case.causal, implementation="mosaic"))


PEERS = {"flash_attn3_jax": flash_attn3_jax, "dew_flash_attn": dew_flash_attn, "cudnn": cudnn, "tokamax": tokamax}


def attentions(case, cu_q, cu_k):
    """Our function and those of the peers that support the case, by name; they take packed q, k and v.

    `cu_q` and `cu_k` are the starts of the sequences.
    """
    functions = {"ours": lambda q, k, v: xa.flash_attn_varlen(q, k, v, cu_q, cu_k, causal=case.causal)}
    for name, prepare in PEERS.items():
        if name == "cudnn" or available(name):
            try:
                functions[name] = prepare(case, cu_q, cu_k)
            except Exception as error:
                report_failure(name, error)
    return {name: call for name, call in functions.items() if call is not None}


def operands_of(case):
    """Random q, k and v."""
    keys = (sum(case.lens), case.kv_heads)
    shapes = [(sum(case.q_lens), case.q_heads, case.head_dim), (*keys, case.head_dim), (*keys, case.value_dim)]
    sources = jax.random.split(jax.random.key(len(case.name)), len(shapes))
    return [jax.random.normal(source, shape, jnp.bfloat16) for source, shape in zip(sources, shapes, strict=True)]


def programs(case, call_of):
    """`call_of(case, attention)` of each function of `attentions`, jitted.

    They take `starts_of(case)` and the operands. XLA would compute constant starts anew, by a kernel in each call.
    """

    def program(name):
        def run(cu_q, cu_k, *operands):
            return call_of(case, attentions(case, cu_q, cu_k)[name])(*operands)

        return jax.jit(run)

    return {name: program(name) for name in attentions(case, *starts_of(case))}


def starts_of(case):
    """The starts of queries and of keys."""
    return starts(case.q_lens), starts(case.lens)


@jax.jit
def relative_error(result, expected):
    """The largest relative error of any array, in the Frobenius norm."""

    def error(a, b):
        a, b = a.reshape(-1).astype(jnp.float32), b.reshape(-1).astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(error, result, expected))))


def agreeing(calls, operands):
    """The calls whose results agree with ours, see `agreeing_calls`."""

    def run(call):
        return jax.block_until_ready(call(*operands))

    return agreeing_calls(calls, run, lambda result, expected: float(relative_error(result, expected)), 2e-2)


def seconds(calls, operands, round_seconds=math.inf):
    """The median time of each call, in interleaved rounds of CALLS calls, or of as many as fit into `round_seconds`."""
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call(*operands))
            count = max(1, int(min(CALLS, round_seconds / (time.perf_counter() - start))))
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            results = [call(*operands) for _ in range(count)]
            jax.block_until_ready(results)
            times[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(taken) for name, taken in times.items()}


def compare(only, call_of, operands_of, factor):
    """Compare `call_of(case, attention)` of all libraries, in the cases over packed keys with a word of `only`.

    Prints a line per case, with `factor` times the operations of attention, then the ratio to the best peer, then JSON.
    """
    rows, ratios = [], []
    for case in CASES:
        is_plain = not case.page_size and case.window < 0 and not case.fp8 and not case.softcap
        if not is_plain or (only and not any(word in case.name for word in only)):
            continue
        operands = [*starts_of(case), *operands_of(case)]
        times = seconds(agreeing(programs(case, call_of), operands), operands)
        rates = {name: factor * case.flops() / taken / 1e12 for name, taken in times.items()}
        best = max((rate for name, rate in rates.items() if name != "ours"), default=None)
        ratios += [rates["ours"] / best] if best else []
        ratio = f"  ours {ratios[-1]:.3f}x the best peer" if best else ""
        print(f"{case.name:32}" + "".join(f" | {name} {rate:.0f}" for name, rate in rates.items()) + ratio, flush=True)
        rows.append({"case": case.name, "tflops": rates})
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"ours to the best peer: {mean:.3f} in geometric mean, {min(ratios):.3f} at least")
    print(json.dumps({"gpu": jax.devices("gpu")[0].device_kind, "jax": jax.__version__, "rows": rows}))


def first(result):
    """The attention output of a peer, which may return more."""
    return result[0] if isinstance(result, tuple) else result


def main(*only):
    """Run the cases."""
    compare(only, lambda _, attention: lambda *operands: first(attention(*operands)), operands_of, 1)
