"""Gradients of flash_attn_varlen over packed keys: a call for each option, and its expected gradients."""

from typing import NamedTuple

import numpy as np

from batches import varlen
from calls import TOLERANCE, key_ranges, score_bias
from expected_results import expected_results

MIXED = [(33, 33), (1, 50), (5, 70), (0, 9), (3, 0), (9, 4)]
# The arguments of `varlen`, the options of the call, and whether softmax_lse has a cotangent too.
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
    "offsets": ({}, {"window": (20, 0), "q_offset": np.int32([5, 30, -2, 0, 3, 7])}, True),
    "key ranges": ({}, {"causal": True, **key_ranges(varlen(MIXED)[0][0])}, False),
    "ends of key ranges": ({"dv": 40}, {"k_end": key_ranges(varlen(MIXED)[0][0])["k_end"]}, True),
    "bias": ({"dv": 40}, {"bias": score_bias(6, rows=33, keys=70)}, True),
    "bias that all share": ({}, {"bias": score_bias(6, 1, 1, keys=61), "causal": True, "softcap": 1.5}, False),
    "bias of bfloat16": ({"dtype": "bfloat16"}, {"bias": score_bias(6, 1, 8, dtype="bfloat16"), "causal": True}, False),
    "bias of float32": ({"dtype": "bfloat16"}, {"bias": score_bias(6, 6, 1), "sinks": np.zeros(8, np.float32)}, False),
    "sinks": ({}, {"sinks": np.linspace(-1, 3, 8, dtype=np.float32), "causal": True}, True),
    "bfloat16": ({"heads": (9, 3), "d": 40, "dtype": "bfloat16"}, {"causal": True}, True),
    "float16": ({"heads": (9, 3), "d": 40, "dtype": "float16"}, {"causal": True}, True),
}


class GradientCase(NamedTuple):
    """One of `CASES`: operands, options and cotangents, in NumPy."""

    operands: tuple  # q, k, v and their starts
    options: dict
    dout: np.ndarray
    dlse: np.ndarray | None

    def check(self, actual):
        """Assert that `actual`, (dq, dk, dv), with sinks dsinks and with a bias dbias, is what the library computes."""
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        arguments = dict(zip(names, self.operands, strict=True)) | self.options
        out, lse = expected_results("flash_attn_varlen", arguments)
        arguments |= {"out": out, "softmax_lse": lse, "dout": self.dout, "dlse": self.dlse}
        for gradient, expected in zip(actual, expected_results("flash_attn_varlen_bwd", arguments), strict=True):
            # A gradient of f32 depends on `out` too, which has the type of q.
            tolerance = max(TOLERANCE[of.dtype.name] for of in (expected, self.operands[0]))
            gradient, expected = (np.asarray(x).astype(np.float64) for x in (gradient, expected))
            atol = tolerance * np.abs(expected).max()
            np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=atol)


def gradient_case(name):
    shape, options, has_dlse = CASES[name]
    operands, lengths = varlen(MIXED, **shape)
    q, _, v = operands[:3]
    # `varlen` fills padding rows with NaN.
    is_live = np.isfinite(q.astype(np.float32)).all(axis=(1, 2))
    rng = np.random.default_rng(3)
    dout = np.where(is_live[:, None, None], rng.standard_normal((*q.shape[:2], v.shape[2])), 0).astype(q.dtype)
    dlse = np.where(is_live[None], rng.standard_normal(q.shape[1::-1]), 0).astype(np.float32)
    return GradientCase(operands, options | lengths, dout, dlse if has_dlse else None)
