"""Gradients of flash_attn_varlen over packed keys, in NumPy and float64, and how close to them a kernel has to be.

The definition is that of `src/ops/flash_attn_varlen_bwd.rs`; it shares no code with the package.
"""

from typing import NamedTuple

import numpy as np

from batches import varlen
from oracle import Sequence, _score, assert_close_like_naive, clamped_rows, positions, visible


class Gradients(NamedTuple):
    """Of q, k, v and the sinks."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray


def _head(q, k, v, dout, dlse, seen, score, position, rounded=lambda x: x):
    """One head of one sequence, whose every row sees a key, and every key is seen: `dq`, `dk`, `dv`, `dsink`.

    `rounded` is what becomes of an intermediate array; all is float64, or for the naive form float32.
    """
    number = q.dtype.type
    products = rounded(number(score.scale) * rounded(q @ k.T))
    slope = np.ones_like(products)
    if score.softcap > 0:
        bent = np.tanh(products / number(score.softcap))
        products, slope = rounded(number(score.softcap) * rounded(bent)), 1 - bent * bent
    logits = products - number(score.slope) * np.abs(position[:, None] - np.arange(len(k))[None, :])
    logits = np.where(seen, logits, number(-np.inf))
    largest = np.maximum(logits.max(axis=1, keepdims=True), number(score.sink))
    weights = np.exp(logits - largest)
    sink = np.exp(number(score.sink) - largest)
    denominator = weights.sum(axis=1, keepdims=True) + sink
    weights, sink = rounded(weights / denominator), sink / denominator
    out = rounded(weights @ v)
    delta = (out * dout).sum(axis=1, keepdims=True) - dlse[:, None]
    dscores = rounded(weights * (rounded(dout @ v.T) - delta) * slope)
    scale = number(score.scale)
    return rounded(scale * (dscores @ k)), scale * (dscores.T @ q), weights.T @ dout, -(sink * delta).sum()


def flash_attn_varlen_gradients(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    dout,
    dlse=None,
    softmax_scale=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    seqused_q=None,
    seqused_k=None,
    leftpad_k=None,
    alibi_slopes=None,
    sinks=None,
    top_left=False,
    naive=False,
):
    """The gradients for the cotangents `dout [Tq, Hq, Dv]` and `dlse [Hq, Tq]`, packed keys and queries.

    `naive` computes them as somebody would with arrays of the operands' dtype.
    """
    dtype = np.asarray(q).dtype
    wide = np.float32 if naive else np.float64
    q, k, v, dout = (np.asarray(x).astype(wide) for x in (q, k, v, dout))
    dlse = np.zeros((q.shape[1], len(q)), wide) if dlse is None else np.asarray(dlse).astype(wide)
    starts_q = np.asarray(cu_seqlens_q, np.int64)
    starts_k = starts_q if cu_seqlens_k is None else np.asarray(cu_seqlens_k, np.int64)
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    score_of = _score(scale, softcap, alibi_slopes, sinks, None, None, None, group)
    found = Gradients(*(np.zeros_like(x) for x in (q, k, v)), np.zeros(q.shape[1]))
    for b in range(len(starts_q) - 1):
        start, end = clamped_rows(starts_q, b, len(q))
        len_q = end - start if seqused_q is None else min(end - start, max(int(seqused_q[b]), 0))
        first, last = clamped_rows(starts_k, b, len(k))
        len_k = last - first if seqused_k is None else int(np.clip(int(seqused_k[b]), 0, last - first))
        leftpad = 0 if leftpad_k is None else int(np.clip(int(leftpad_k[b]), 0, len_k))
        right = 0 if causal else window[1]
        seen = visible(len_q, len_k, window[0], right, top_left=top_left, leftpad=leftpad)
        rows, keys = np.flatnonzero(seen.any(axis=1)), np.flatnonzero(seen.any(axis=0))
        nothing = start + np.flatnonzero(~seen.any(axis=1))
        if sinks is not None:
            found.dsinks[:] += dlse[:, nothing].sum(axis=1)  # the sink is all that such a row has
        if not len(rows):
            continue
        position = positions(len_q, len_k, top_left)[rows] - keys[0]
        assert (np.diff(keys) == 1).all(), "keys that are seen are neighbours"
        for h in range(q.shape[1]):
            at, of = (start + rows, h), (first + keys, h // group)
            dq, dk, dv, dsink = _head(
                q[at],
                k[of],
                v[of],
                dout[at],
                dlse[h, start + rows],
                seen[np.ix_(rows, keys)],
                score_of(Sequence(b, slice(start, start + len_q), len_q, len_k), h),
                position,
                (lambda x: x.astype(dtype).astype(np.float32)) if naive else (lambda x: x),
            )
            found.dq[at] = dq
            found.dk[of] += dk
            found.dv[of] += dv
            found.dsinks[h] += dsink
    return found


def assert_gradients(found, *operands, **options):
    """`found` is (dq, dk, dv) or (dq, dk, dv, dsinks), each of them what SPEC 2.1 allows for these operands."""
    exact = flash_attn_varlen_gradients(*operands, **options)
    naive = flash_attn_varlen_gradients(*operands, **options, naive=True)
    for name, actual, wanted, measure in zip(Gradients._fields, found, exact, naive, strict=False):
        assert_close_like_naive(actual, wanted, measure, factor=3.0, floor=1e-4, name=name)


MIXED = [(33, 33), (1, 50), (5, 70), (0, 9), (3, 0), (9, 4)]
# What a call is made of, its options, and whether the log-sum-exps have a cotangent too.
CASES = {
    "full": ({"dv": 40, "unused": (2, 3)}, {}, False),
    "causal": ({"dv": 40, "unused": (2, 3)}, {"causal": True}, True),
    "top left": ({}, {"causal": True, "top_left": True}, False),
    "window": ({"dv": 40}, {"window": (7, 3)}, True),
    "sliding window": ({}, {"window": (9, -1), "causal": True}, False),
    "soft cap": ({}, {"softcap": 1.5, "causal": True}, False),
    "scale": ({}, {"softmax_scale": 0.3, "deterministic": True}, False),
    "slopes": ({}, {"alibi_slopes": np.linspace(0.05, 0.4, 8, dtype=np.float32)}, False),
    "slopes of each sequence": (
        {"dv": 40},
        {"alibi_slopes": np.linspace(0, 0.4, 48, dtype=np.float32).reshape(6, 8), "causal": True},
        False,
    ),
    "padding": ({"unused": (2, 3)}, {"leftpad_k": np.int32([3, 0, 70, 1, 0, 2])}, False),
    "sinks": ({}, {"sinks": np.linspace(-1, 3, 8, dtype=np.float32), "causal": True}, True),
    "bfloat16": ({"heads": (9, 3), "d": 40, "dtype": "bfloat16"}, {"causal": True}, True),
    "float16": ({"heads": (9, 3), "d": 40, "dtype": "float16"}, {"causal": True}, True),
}


class GradientCase(NamedTuple):
    """Of `CASES`: what to ask the gradients of, all in NumPy."""

    operands: tuple  # q, k, v and their starts
    options: dict
    dout: np.ndarray
    dlse: np.ndarray | None

    def check(self, found):
        """`found` as `assert_gradients` takes it."""
        options = {name: x for name, x in self.options.items() if name != "deterministic"}
        assert_gradients(found, *self.operands, **options, dout=self.dout, dlse=self.dlse)


def gradient_case(name):
    form, options, of_lse = CASES[name]
    operands, lengths = varlen(MIXED, **form)
    q, _, v = operands[:3]
    owned = np.isfinite(q.astype(np.float32)).all(axis=(1, 2))
    rng = np.random.default_rng(3)
    dout = np.where(owned[:, None, None], rng.standard_normal((*q.shape[:2], v.shape[2])), 0).astype(q.dtype)
    dlse = np.where(owned[None], rng.standard_normal(q.shape[1::-1]), 0).astype(np.float32)
    return GradientCase(operands, options | lengths, dout, dlse if of_lse else None)
