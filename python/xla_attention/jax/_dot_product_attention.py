"""dot_product_attention in JAX: dense batches, computed by the kernels of flash_attn_varlen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._options import kv_layout_number, length_advice
from ._call import Array, static_bool, static_f32, static_i64
from ._flash_attn_varlen import attend
from ._indices import index_operand
from ._varlen_types import Operands, Options


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
) -> Array:
    """`jax.nn.dot_product_attention`, computed by the kernels of `flash_attn_varlen`.

    Parameters
    ----------
    query : Array
        ``[B, T, N, H]`` or ``[T, N, H]``; H a multiple of 8 up to 256; f16, bf16 or f32.
    key, value : Array
        ``[B, S, K, H]`` or ``[S, K, H]``, K a divisor of N; the value's H may differ.
    bias, mask
        Not supported; use ``implementation="xla"``.
    scale : float, optional
        Multiplies ``q . k``; ``H ** -0.5`` by default.
    is_causal : bool
        Query t sees keys up to t: aligned at the first key, also where T and S differ.
    query_seq_lengths, key_value_seq_lengths : Array, optional
        ``i32[B]``: rows and keys past these lengths are padding. Padding rows of the result are 0.
    local_window_size : int or (int, int), optional
        Query t sees keys ``t - left`` to ``t + right``.
    implementation : str, optional
        ``"xla"`` or ``"cudnn"`` passes the call on to `jax.nn.dot_product_attention`.

    Returns
    -------
    Array
        Of the query's shape (with the value's last dimension) and dtype. A query that sees no key gives 0;
        `jax.nn.dot_product_attention` gives the mean of all values.

    Raises
    ------
    ValueError
        Shapes or options do not fit together.
    NotImplementedError
        A bias or a mask is given.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from xla_attention.jax import dot_product_attention
    >>> q, k, v = (jax.random.normal(jax.random.key(i), (2, 16, 4, 64)) for i in range(3))
    >>> dot_product_attention(q, k, v, is_causal=True).shape
    (2, 16, 4, 64)
    """
    if implementation is not None:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation=implementation,
        )
    for name, given in (("bias", bias), ("mask", mask)):
        if given is not None:
            raise NotImplementedError(
                f"dot_product_attention: {name} is not supported; is_causal, local_window_size and lengths are, and "
                'implementation="xla" takes everything'
            )
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    _check_shapes(query, key, value)
    if query.ndim == 3:
        batched = dot_product_attention(
            query[None],
            key[None],
            value[None],
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=_at_least_1d(query_seq_lengths),
            key_value_seq_lengths=_at_least_1d(key_value_seq_lengths),
            local_window_size=local_window_size,
        )
        return batched[0]
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size or (-1, -1)
    options = Options(
        batch_invariant=np.bool_(False),
        causal=static_bool("is_causal", is_causal),
        deterministic=np.bool_(False),
        kv_layout=kv_layout_number(None),
        max_seqlen_k=_longest(key.shape[1]),
        max_seqlen_q=_longest(query.shape[1]),
        softcap=np.float32(0),
        softmax_scale=static_f32("scale", query.shape[-1] ** -0.5 if scale is None else scale),
        top_left=np.bool_(True),
        window_left=static_i64("local_window_size[0]", window[0]),
        window_right=static_i64("local_window_size[1]", window[1]),
        out_dtype=query.dtype,
        dense=True,
    )
    lengths = {
        name: None if given is None else index_operand(argument, given)
        for name, argument, given in (
            ("seqused_q", "query_seq_lengths", query_seq_lengths),
            ("seqused_k", "key_value_seq_lengths", key_value_seq_lengths),
        )
    }
    return attend(options, Operands(query, key, value, **lengths), return_lse=False)


def _longest(length: Any) -> np.int64:  # noqa: ANN401
    return length_advice(length if isinstance(length, int) else 0)


def _at_least_1d(lengths: Any) -> Array | None:  # noqa: ANN401
    return None if lengths is None else jnp.atleast_1d(jnp.asarray(lengths))


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    """What the packed form cannot tell apart: the batch and the lengths of key and value."""
    if query.ndim not in (3, 4) or key.ndim != query.ndim or value.ndim != query.ndim:
        shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in (("query", query), ("key", key), ("value", value)))
        raise ValueError(f"dot_product_attention: {shapes}, expected [B, T, N, H] or [T, N, H] for all three")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"dot_product_attention: value has shape {list(value.shape)}, expected {list(key.shape[:-1])} and any head "
            "dimension"
        )
    if query.ndim == 4 and query.shape[0] != key.shape[0]:
        raise ValueError(f"dot_product_attention: key has a batch of {key.shape[0]}, expected {query.shape[0]}")
