"""Dense attention with any mask in f64 NumPy: the oracle for dot_product_attention."""

import numpy as np


def dense_attention(query, key, value, mask, *, scale=None, softcap=0.0, sinks=None):
    """`out` and the log-sum-exps ``[B, T, N]`` for ``mask[B, N, T, S]``, any of which may be 1."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, group, axis=2) for x in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(mask, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(np.float64(sinks)[:, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, column], -1)
    highest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total))[..., 0]
    weights = (weights / np.where(total == 0, 1, total))[..., : key.shape[1]]
    return np.einsum("bnts,bsnh->btnh", weights, value), lse.transpose(0, 2, 1)
