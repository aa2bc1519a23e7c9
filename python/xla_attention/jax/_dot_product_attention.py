"""dot_product_attention in JAX: flash_attn_varlen over a dense batch."""

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._options import kv_layout_number, length_hint, reject_dropout
from ._call import Array, static_bool, static_f32, static_i64
from ._flash_attn_varlen import attend
from ._indices import index_operand
from ._varlen_types import Operands, Options

_NAME = "dot_product_attention"
_ALTERNATIVE = 'implementation="xla" takes everything that jax.nn.dot_product_attention does'


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
    return_residual: bool = False,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    broadcast_dropout: bool = True,
    deterministic: bool = False,
    dtype: Any = None,  # noqa: ANN401
    precision: Any = None,  # noqa: ANN401
    force_fp32_for_softmax: bool = False,
    module: Any = None,  # noqa: ANN401
    qk_attn_weights_einsum: Any = None,  # noqa: ANN401
    attn_weights_value_einsum: Any = None,  # noqa: ANN401
) -> Array | tuple[Array, Array]:
    """`jax.nn.dot_product_attention`, computed by the kernels of `flash_attn_varlen`.

    It has every argument of JAX's function, and those that Flax passes to the ``attention_fn`` of its modules. An
    argument that the kernels do not support raises an error that names it, and is never ignored;
    ``implementation="xla"`` passes the call to JAX. ``docs/semantics.md#flash_attn_varlen`` defines the results.

    Parameters
    ----------
    query : Array
        ``[B, T, N, H]`` or ``[T, N, H]``; H a multiple of 8 up to 256; f16, bf16 or f32.
    key, value : Array
        ``[B, S, K, H]`` or ``[S, K, H]``, K a divisor of N; the value's H may differ.
    bias, mask
        Not supported.
    scale : float, optional
        Multiplies ``q . k``; ``H ** -0.5`` by default. Finite, positive, and a compile-time constant.
    is_causal : bool
        Query t attends to keys up to t, also where T and S differ (top-left alignment).
    query_seq_lengths, key_value_seq_lengths : Array, optional
        ``i32[B]``: rows and keys past these lengths are padding. Padding rows of the result are 0.
    local_window_size : int or (int, int), optional
        Query t attends to keys ``t - left`` to ``t + right``; neither is negative.
    implementation : str, optional
        ``"xla"`` or ``"cudnn"`` passes the call to `jax.nn.dot_product_attention`.
    return_residual : bool
        Whether to return `residual` too; together with `implementation` only from JAX 0.8.1 on.
    dropout_rate, dropout_rng, broadcast_dropout, deterministic
        There is no dropout: `dropout_rate` has to be 0, unless `deterministic` is True, which switches dropout off as
        in Flax.
    dtype : dtype, optional
        Has to be the query's dtype.
    precision, force_fp32_for_softmax
        Ignored: products are accumulated in f32, and the softmax is computed in f32.
    module, qk_attn_weights_einsum, attn_weights_value_einsum
        Not supported: the matrix of weights is never materialised.

    Returns
    -------
    out : Array
        ``[B, T, N, H]`` or ``[T, N, H]`` with the value's H, of the query's dtype. A query that attends to no key gives
        0, where `jax.nn.dot_product_attention` gives the mean of all values.
    residual : Array
        ``[B, T, N]`` or ``[T, N]``, of the key's dtype: natural logarithm of the softmax denominators; -inf for a query
        that attends to no key, where JAX has a large negative number. As in JAX it has no gradient; `softmax_lse` of
        `flash_attn_varlen` has one, and is f32. Only with ``return_residual=True``.

    Raises
    ------
    ValueError
        Shapes or options do not fit together.
    TypeError
        An option that is a compile-time constant is traced.
    NotImplementedError
        A bias, a mask, dropout, or a dtype or head dimension that there is no kernel for.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from xla_attention.jax import dot_product_attention
    >>> q, k, v = (jax.random.normal(jax.random.key(i), (2, 16, 4, 64)) for i in range(3))
    >>> dot_product_attention(q, k, v, is_causal=True).shape
    (2, 16, 4, 64)
    """
    del dropout_rng, broadcast_dropout, precision, force_fp32_for_softmax
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if isinstance(deterministic, jax.core.Tracer) or not deterministic:
        reject_dropout(_NAME, "dropout_rate", dropout_rate)
    if dtype is not None and jnp.dtype(dtype) != query.dtype:
        raise NotImplementedError(
            f"{_NAME}: dtype is {jnp.dtype(dtype)} and query is {query.dtype}; cast query, key and value before"
        )
    for name, given in (
        ("module", module),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if given is not None:
            raise NotImplementedError(f"{_NAME}: {name} is not supported; no matrix of weights is ever computed")
    return_residual = bool(static_bool(f"{_NAME}: return_residual", return_residual))
    if implementation is not None:
        if return_residual and not _jax_returns_residuals():
            raise NotImplementedError(f"{_NAME}: return_residual with implementation needs jax >= 0.8.1")
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
            **({"return_residual": True} if return_residual else {}),
        )
    for name, given in (("bias", bias), ("mask", mask)):
        if given is not None:
            raise NotImplementedError(
                f"{_NAME}: {name} is not supported; is_causal, local_window_size and lengths are, and {_ALTERNATIVE}"
            )
    _check_shapes(query, key, value)
    is_batched = query.ndim == 4
    lengths = {
        name: None if given is None else index_operand(f"{_NAME}: {argument}", given)
        for name, argument, given in (
            ("seqused_q", "query_seq_lengths", query_seq_lengths),
            ("seqused_k", "key_value_seq_lengths", key_value_seq_lengths),
        )
    }
    if not is_batched:
        query, key, value = query[None], key[None], value[None]
        lengths = {name: None if given is None else jnp.atleast_1d(given) for name, given in lengths.items()}
    window_left, window_right = _window(local_window_size)
    options = Options(
        batch_invariant=np.bool_(False),
        causal=static_bool(f"{_NAME}: is_causal", is_causal),
        deterministic=np.bool_(False),
        kv_layout=kv_layout_number(None),
        max_seqlen_k=_length_hint(key.shape[1]),
        max_seqlen_q=_length_hint(query.shape[1]),
        softcap=np.float32(0),
        softmax_scale=_scale(query.shape[-1] ** -0.5 if scale is None else scale),
        top_left=np.bool_(True),
        window_left=window_left,
        window_right=window_right,
        out_dtype=query.dtype,
        dense=True,
    )
    try:
        out, lse = attend(options, Operands(query, key, value, **lengths), return_lse=True)
    except (ValueError, NotImplementedError) as error:
        if not str(error).startswith(_TARGET):
            raise
        raise type(error)(_translate(str(error))) from None
    if not return_residual:
        return out if is_batched else out[0]
    residual = jax.lax.stop_gradient(jnp.transpose(lse, (1, 2, 0)).astype(key.dtype))
    return (out, residual) if is_batched else (out[0], residual[0])


def _jax_returns_residuals() -> bool:
    return "return_residual" in inspect.signature(jax.nn.dot_product_attention).parameters


def _length_hint(length: Any) -> np.int64:  # noqa: ANN401
    """The hint for a dense dimension; a symbolic one (jax.export) is unknown."""
    return length_hint(length if isinstance(length, int) else 0)


def _scale(scale: float) -> np.float32:
    scale = static_f32(f"{_NAME}: scale", scale)
    if not (np.isfinite(scale) and scale > 0):
        raise NotImplementedError(f"{_NAME}: scale is {scale}, expected finite and > 0; {_ALTERNATIVE}")
    return scale


def _window(size: Any) -> tuple[np.int64, np.int64]:  # noqa: ANN401
    """How many keys before and after its own position a query attends to; -1 for no limit."""
    if size is None:
        return np.int64(-1), np.int64(-1)
    try:
        sides = tuple(size)
    except TypeError:  # one number
        sides = (size, size)
    if len(sides) != 2:
        raise ValueError(f"{_NAME}: local_window_size is {size}, expected a number or (left, right)")
    left, right = (static_i64(f"{_NAME}: local_window_size[{i}]", side) for i, side in enumerate(sides))
    if min(left, right) < 0:
        raise ValueError(f"{_NAME}: local_window_size is {size}, expected >= 0; None is no window")
    return left, right


# This function's arguments by the operands of flash_attn_varlen.
_TARGET = "xla_gpu_flash_attn_varlen: "
_OPERANDS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "seqused_q": "query_seq_lengths",
    "seqused_k": "key_value_seq_lengths",
}


def _translate(text: str) -> str:
    """An error of flash_attn_varlen with the names of this function's arguments."""
    text = re.sub(rf"\b({'|'.join(_OPERANDS)})\b", lambda word: _OPERANDS[word[0]], text.removeprefix(_TARGET))
    return f"{_NAME}: {text}"


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    """Validate what the packed form merges (batch and lengths) or would name by other shapes."""
    if query.ndim not in (3, 4) or key.ndim != query.ndim or value.ndim != query.ndim:
        shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in (("query", query), ("key", key), ("value", value)))
        raise ValueError(f"{_NAME}: {shapes}, expected [B, T, N, H] or [T, N, H] for all three")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"{_NAME}: value has shape {list(value.shape)}, expected {list(key.shape[:-1])} and any head dimension"
        )
    if query.ndim == 4 and query.shape[0] != key.shape[0]:
        raise ValueError(f"{_NAME}: key has a batch of {key.shape[0]}, expected {query.shape[0]}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"{_NAME}: key has head dimension {key.shape[-1]}, expected {query.shape[-1]}, the query's")
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{_NAME}: key has {kv_heads} heads, expected a divisor of {heads}, the query's")
