"""Programs whose custom calls must not change between versions (`test_released_programs.py`).

    python tests/python/released_programs.py FOLDER OPERATOR        # store the program of a new operator

Stored programs of other operators stay as they are.
"""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import xla_attention.jax as xa

F32, I32 = jnp.float32, jnp.int32


def spec(*shape, dtype=F32):
    """The shape and dtype of an operand."""
    return jax.ShapeDtypeStruct(shape, dtype)


SEQUENCES = (spec(2, dtype=I32), spec(2, 2, dtype=I32), spec(3, dtype=I32), spec(1, dtype=I32))
ROWS = (spec(3, 1, 8), spec(3, 1, 8), spec(3, dtype=I32))
SLOPES, SCALE = spec(2), spec(1)


def _paged(q, cache, *rest):
    *sequences, slopes, sinks, scale = rest
    options = {"sliding_window": 5, "soft_cap": 3.0, "alibi_slopes": slopes, "sinks": sinks}
    scales = {"q_scale": scale, "k_scale": scale, "v_scale": scale}
    return xa.paged_attention(q, cache, *sequences, scale=0.25, return_lse=True, **options, **scales)


def _varlen(q, k, v, starts):
    return xa.flash_attn_varlen(q, k, v, starts, causal=True, window=(4, -1), softcap=2.0, return_lse=True)


def _varlen_ranges(q, k, v, starts, k_start, k_end):
    return xa.flash_attn_varlen(q, k, v, starts, k_start=k_start, k_end=k_end)


def _gradients_of_ranges(q, k, v, *rest):
    return jax.grad(lambda *x: _varlen_ranges(*x, *rest).sum(), (0, 1, 2))(q, k, v)


def _varlen_bias(q, k, v, starts, bias):
    return xa.flash_attn_varlen(q, k, v, starts, bias=bias)


def _gradients_of_bias(q, k, v, starts, bias):
    return jax.grad(lambda *x: _varlen_bias(*x[:3], starts, x[3]).sum(), (0, 1, 2, 3))(q, k, v, bias)


def _paged_ranges(q, cache, *rest):
    *sequences, k_start, k_end = rest
    return xa.paged_attention(q, cache, *sequences, scale=0.25, k_start=k_start, k_end=k_end)


def _paged_trees(q, cache, *rest):
    *sequences, tree_mask = rest
    return xa.paged_attention(q, cache, *sequences, scale=0.25, tree_mask=tree_mask)


def _scaled(q, cache, scales, *rest):
    sequences, (keys, values, slots) = rest[:4], rest[4:]
    cache, scales = xa.kv_cache_update(cache, keys, values, slots, kv_scale_cache=scales)
    new = keys, values, slots
    out, cache, scales = xa.paged_attention_update(q, cache, *sequences, *new, scale=0.25, kv_scale_cache=scales)
    gathered = xa.gather_kv_cache(cache, sequences[1], sequences[0], capacity=6, dtype=F32, kv_scale_cache=scales)
    return out, xa.paged_attention(q, cache, *sequences, scale=0.25, kv_scale_cache=scales), *gathered, cache, scales


def _gradients(q, k, v, starts):
    return jax.grad(lambda *x: _varlen(*x, starts)[0].sum(), (0, 1, 2))(q, k, v)


LATENT_SEQUENCES = (spec(3, dtype=I32), spec(2, dtype=I32), spec(2, 2, dtype=I32))


def _latent(q, cache, *rest):
    *sequences, count, sinks, scale = rest
    options = {"causal": True, "window": (5, -1), "softcap": 3.0, "num_seqs": count, "sinks": sinks, "kv_scale": scale}
    return xa.mla_paged_attention(q, cache, *sequences, softmax_scale=0.25, head_dim_v=8, return_lse=True, **options)


VARLEN = (spec(3, 2, 8), spec(3, 1, 8), spec(3, 1, 8), spec(3, dtype=I32))
RANGES = (spec(3, dtype=I32), spec(3, dtype=I32))
BIAS = spec(2, 1, 3, 3)

# The function and operands of each program, by the name of its operator, and after a dot of what came to it later.
PROGRAMS = {
    "simple_add": (xa.simple_add, (spec(4), spec(4))),
    "paged_attention": (_paged, (spec(3, 2, 8), spec(4, 2, 2, 8), *SEQUENCES, SLOPES, SLOPES, SCALE)),
    "paged_attention.key_ranges": (_paged_ranges, (spec(3, 2, 8), spec(4, 2, 2, 8), *SEQUENCES, *RANGES)),
    "paged_attention.tree_mask": (
        _paged_trees,
        (spec(3, 2, 8), spec(4, 2, 2, 8), *SEQUENCES, spec(2, 3, 1, dtype=I32)),
    ),
    "paged_attention_update.scale_cache": (
        _scaled,
        (
            spec(3, 2, 8, dtype=jnp.bfloat16),
            spec(4, 2, 2, 8, dtype=jnp.float8_e4m3fn),
            spec(4, 2, 2),
            *SEQUENCES,
            *ROWS,
        ),
    ),
    "kv_cache_update": (xa.kv_cache_update, (spec(4, 2, 2, 8), *ROWS)),
    "kv_cache_update_split": (lambda k, v, *rows: xa.kv_cache_update((k, v), *rows), (spec(4, 2, 1, 8),) * 2 + ROWS),
    "flash_attn_varlen": (_varlen, VARLEN),
    "flash_attn_varlen.key_ranges": (_varlen_ranges, VARLEN + RANGES),
    "flash_attn_varlen.bias": (_varlen_bias, (*VARLEN, BIAS)),
    "merge_attention_states": (xa.merge_attention_states, (spec(3, 2, 8), spec(2, 3)) * 2),
    "rope_kv_cache_update": (
        lambda *x: xa.rope_kv_cache_update(*x, interleaved=True),
        (spec(4, 2, 2, 8), spec(3, 2, 8), *ROWS, spec(3, dtype=I32), spec(6, 4)),
    ),
    "paged_attention_update": (
        lambda q, cache, *rest: xa.paged_attention_update(q, cache, *rest, scale=0.25),
        (spec(3, 2, 8), spec(4, 2, 2, 8), *SEQUENCES, *ROWS),
    ),
    "mla_paged_attention": (
        _latent,
        (spec(3, 2, 16), spec(4, 2, 16), *LATENT_SEQUENCES, spec(1, dtype=I32), SLOPES, SCALE),
    ),
    "mla_paged_attention_update": (
        lambda q, cache, *rest: xa.mla_paged_attention_update(q, cache, *rest, softmax_scale=0.25),
        (spec(3, 2, 16), spec(4, 2, 16), *LATENT_SEQUENCES, spec(3, 8), spec(3, 8), spec(3, dtype=I32)),
    ),
    "gather_kv_cache": (
        lambda *x: xa.gather_kv_cache(*x[:3], capacity=6, dtype=F32, k_scale=x[3], v_scale=x[4]),
        (spec(4, 2, 2, 8, dtype=jnp.float8_e4m3fn), spec(2, 2, dtype=I32), spec(2, dtype=I32), SCALE, SCALE),
    ),
    "flash_attn_varlen_bwd": (_gradients, VARLEN),
    "flash_attn_varlen_bwd.key_ranges": (_gradients_of_ranges, VARLEN + RANGES),
    "flash_attn_varlen_bwd.bias": (_gradients_of_bias, (*VARLEN, BIAS)),
}


def custom_calls(name):
    """The custom calls of a program in StableHLO, without names of values and without the size of the workspace."""
    function, operands = PROGRAMS[name]
    text = jax.jit(function).lower(*operands).as_text()
    calls = [line.strip() for line in text.splitlines() if "stablehlo.custom_call @xla_gpu" in line]
    without_names = (re.sub(r"%\w+(:\d+)?(#\d+)?", "%", call) for call in calls)
    return "".join(re.sub(r"tensor<\d+xui8>", "tensor<Nxui8>", call) + "\n" for call in without_names)


def exported(name):
    """A program serialised by jax.export."""
    function, operands = PROGRAMS[name]
    checks = xa.export_disabled_checks()
    return export.export(jax.jit(function), platforms=["cpu", "cuda"], disabled_checks=checks)(*operands).serialize()


def operands_of(name):
    """Operands for a program, with small integers as indices."""
    random = np.random.default_rng(0)
    operands = []
    for x in PROGRAMS[name][1]:
        integers = jnp.issubdtype(x.dtype, jnp.integer)
        numbers = np.sort(random.integers(0, 4, x.shape)) if integers else random.random(x.shape) + 0.5
        operands.append(jnp.asarray(numbers, x.dtype))
    return operands


if __name__ == "__main__":
    folder, program = pathlib.Path(sys.argv[1]), sys.argv[2]
    (folder / f"{program}.mlir").write_text(custom_calls(program))
    (folder / f"{program}.jax").write_bytes(exported(program))
