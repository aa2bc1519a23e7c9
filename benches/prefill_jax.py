"""Prefill from JAX beside its peers: `make bench ARGS="prefill_jax.py word"` runs the cases that have the word in their
name.

Answers are compared before anything is timed. Ours and the peers take turns, each turn a number of calls of a jitted
function, waited for together. The last line is all of it as JSON.
"""

import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import xla_attention.jax as xa
from peers import available
from prefill_cases import CASES

ROUNDS = 7
CALLS = 10
PAUSE_SECONDS = 0.1


def starts(lens):
    """cu_seqlens of lengths."""
    return jnp.asarray(np.concatenate([[0], np.cumsum(lens)]), jnp.int32)


def flash_attn3_jax(case, cu_q, cu_k):
    """FA3 by flash-attn3-jax."""
    from flash_attn3_jax import flash_mha_varlen

    options = {"is_causal": case.causal, "max_seqlen_q": max(case.q_lens), "max_seqlen_k": max(case.lens)}
    return lambda q, k, v: flash_mha_varlen(q, k, v, cu_q, cu_k, **options)


def dew_flash_attn(case, cu_q, cu_k):
    """FA3 by dew-flash-attn."""
    from dew_flash_attn import flash_mha_varlen

    keys = {} if case.q_lens == case.lens else {"key_cu_seqlens": cu_k, "key_max_seqlen": max(case.lens)}
    return lambda q, k, v: flash_mha_varlen(q, k, v, cu_q, max(case.q_lens), is_causal=case.causal, **keys)


def cudnn(case, _cu_q, _cu_k):
    """cuDNN by jax.nn, on sequences of one length."""
    if case.is_ragged() or case.q_lens != case.lens:
        return None

    def run(q, k, v):
        q, k, v = (x.reshape(len(case.lens), -1, *x.shape[1:]) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, implementation="cudnn")

    return run


PEERS = {"flash_attn3_jax": flash_attn3_jax, "dew_flash_attn": dew_flash_attn, "cudnn": cudnn}


def calls_of(case):
    """Ours and the peers that are here and take the case, jitted, by name; and their operands."""
    rng = np.random.default_rng(len(case.name))
    keys = (sum(case.lens), case.kv_heads)
    shapes = [(sum(case.q_lens), case.q_heads, case.head_dim), (*keys, case.head_dim), (*keys, case.value_dim)]
    operands = [jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes]
    cu_q, cu_k = starts(case.q_lens), starts(case.lens)
    calls = {"ours": lambda q, k, v: xa.flash_attn_varlen(q, k, v, cu_q, cu_k, causal=case.causal)}
    for name, prepare in PEERS.items():
        if name == "cudnn" or available(name):
            calls[name] = prepare(case, cu_q, cu_k)
    return {name: jax.jit(call) for name, call in calls.items() if call is not None}, operands


def agreeing(calls, operands):
    """The calls that run here; one that runs and gives something else is an error."""
    wanted = np.asarray(calls["ours"](*operands), np.float32)
    found = {}
    for name, call in calls.items():
        try:
            result = jax.block_until_ready(call(*operands))
        except Exception as error:  # whatever a peer has against this GPU or case
            print(f"  {name} did not run: {type(error).__name__}: {str(error)[:160]}")
            continue
        result = np.asarray(result[0] if isinstance(result, tuple) else result, np.float32).reshape(wanted.shape)
        error = np.linalg.norm(result - wanted) / np.linalg.norm(wanted)
        assert error < 2e-2, f"{name} differs from ours by {error:.1e}"
        found[name] = call
    return found


def seconds(calls, operands):
    """Median time of one call of each, taken in turns."""
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            jax.block_until_ready(call(*operands))
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            results = [call(*operands) for _ in range(CALLS)]
            jax.block_until_ready(results)
            times[name].append((time.perf_counter() - start) / CALLS)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main(only=""):
    """Run the cases over packed keys; a line for each, then the same as JSON."""
    rows = []
    for case in CASES:
        if only not in case.name or case.page_size or case.window >= 0 or case.fp8:
            continue
        calls, operands = calls_of(case)
        rates = {n: case.flops() / taken / 1e12 for n, taken in seconds(agreeing(calls, operands), operands).items()}
        best = max((rate for name, rate in rates.items() if name != "ours"), default=None)
        ratio = f"  ours {rates['ours'] / best:.3f}x the best peer" if best else ""
        print(f"{case.name:32}" + "".join(f" | {name} {rate:.0f}" for name, rate in rates.items()) + ratio, flush=True)
        rows.append({"case": case.name, "tflops": rates})
    print(json.dumps({"gpu": jax.devices("gpu")[0].device_kind, "jax": jax.__version__, "rows": rows}))
