"""dot_product_attention in JAX: `jax.nn.dot_product_attention` by the kernels of `flash_attn_varlen`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._options import reject_dropout
from ._call import Array, static_bool, static_f32, static_i64
from ._dot_product_call import NAME, Arguments, TracedScaleError, by_jax, by_kernels
from ._indices import index_operand
from ._masks import FORMS, as_4d, is_known
from ._segment_ids import id_arrays, padding_id

_ALTERNATIVE = 'fallback="xla" lets jax.nn.dot_product_attention compute such calls'


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
    segment_ids: Array | tuple[Array, Array] | None = None,
    padding_segment_id: int | None = None,
    max_segments: int | None = None,
    sinks: Array | None = None,
    softcap: float = 0.0,
    mask_form: str | None = None,
    k_start: Array | None = None,
    k_end: Array | None = None,
    fallback: str = "error",
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

    It has every argument of JAX's function, those that Flax passes to the ``attention_fn`` of its modules, and a few
    more. What the kernels cannot compute exactly raises an error, or goes to JAX's function with ``fallback="xla"``;
    no argument is ignored silently. ``docs/dot_product_attention.md`` has the rules, and
    ``docs/semantics.md#flash_attn_varlen`` defines the results.

    Parameters
    ----------
    query : Array
        ``[B, T, N, H]`` or ``[T, N, H]``; H a multiple of 8 up to 512; f16, bf16 or f32.
    key, value : Array
        ``[B, S, K, H]`` or ``[S, K, H]``, K a divisor of N; the value's H may differ.
    bias : Array, optional
        Broadcastable to ``[B, N, T, S]``, added to the scaled scores. It has a gradient.
    mask : Array, optional
        ``bool``, broadcastable to ``[B, N, T, S]``: a query attends to a key where it is True. The kernels are fastest
        with a mask whose values are known when the program is traced, if the keys of each query are adjacent (above all
        if it is causal, a window, padding, or several of these); with one that is the same for all queries,
        ``[B, 1, 1, S]``, without other masks; and with a `mask_form`. Any other one becomes a bias, an array of its
        shape and the query's dtype.
    scale : float, optional
        Multiplies ``q . k``; ``H ** -0.5`` by default. Finite, and a compile-time constant.
    is_causal : bool
        Query t attends to keys up to t, also where T and S differ (top-left alignment).
    query_seq_lengths, key_value_seq_lengths : Array, optional
        ``i32[B]``: rows and keys past these lengths are padding. Padding rows of the result are 0.
    local_window_size : int or (int, int), optional
        Query t attends to keys ``t - left`` to ``t + right``; neither is negative.
    implementation : str, optional
        ``"xla"`` or ``"cudnn"`` passes the call to `jax.nn.dot_product_attention`.
    return_residual : bool
        Whether to return `residual` too; together with JAX's function only from JAX 0.8.1 on.
    segment_ids : Array or (Array, Array), optional
        Integers ``[B, T]``, or a pair ``[B, T]`` and ``[B, S]`` for queries and keys (without B as query and key): a
        query attends to the keys of its own id, as in the mask ``q_ids == kv_ids``. Equal ids have to be adjacent, and
        of a pair without other masks the ids that both have in one order; otherwise the results of that batch entry are
        NaN, or a ValueError if the ids are NumPy arrays.
    padding_segment_id : int, optional
        The id of padding, commonly 0 or -1, which may occur anywhere: these rows of the result are 0, and no query
        attends to these keys. By default no id is special.
    max_segments : int, optional
        The most segments in a row of `segment_ids`, without padding; T by default. The call reserves and reads metadata
        for so many. The results of a batch entry with more are NaN.
    sinks : Array, optional
        ``f32[N]``: the logit of one more column per head in the softmax, with the value 0.
    softcap : float
        Scores are ``softcap * tanh(score / softcap)``; 0 switches it off.
    mask_form : str, optional
        A promise about a traced mask ``[B, 1, T, S]``, with the lengths of padding in its values: ``"causal"`` (and
        padding after the sequence, or keys before it), ``"padding"``, or ``"ranges"``, where the keys of each query are
        adjacent. The device compares the mask with this form; the results of a batch entry that has another one are
        NaN.
    k_start, k_end : Array, optional
        ``i32[B, T]`` (without B as query): query t attends to key s only if ``k_start[b, t] <= s < k_end[b, t]``,
        besides all other masks. Prefixes, documents, chunks, spans of images.
    fallback : str
        ``"error"``, or ``"xla"`` for JAX's function: what to do with a call that the kernels cannot compute.
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
        Dropout; with ``fallback="error"`` also a dtype or head dimension that there is no kernel for; with
        ``fallback="xla"`` sinks or a soft cap in a call that JAX's function would have to compute.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from xla_attention.jax import dot_product_attention
    >>> q, k, v = (jax.random.normal(jax.random.key(i), (2, 16, 4, 64)) for i in range(3))
    >>> dot_product_attention(q, k, v, is_causal=True).shape
    (2, 16, 4, 64)

    Packed documents, with padding at the end.

    >>> ids = jnp.array([[1] * 9 + [2] * 7, [1] * 4 + [2] * 10 + [0] * 2])
    >>> dot_product_attention(q, k, v, is_causal=True, segment_ids=ids, padding_segment_id=0).shape
    (2, 16, 4, 64)
    """
    del dropout_rng, broadcast_dropout, precision, force_fp32_for_softmax
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if isinstance(deterministic, jax.core.Tracer) or not deterministic:
        reject_dropout(NAME, "dropout_rate", dropout_rate)
    if dtype is not None and jnp.dtype(dtype) != query.dtype:
        raise NotImplementedError(
            f"{NAME}: dtype is {jnp.dtype(dtype)} and query is {query.dtype}; cast query, key and value before"
        )
    for name, given in (
        ("module", module),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if given is not None:
            raise NotImplementedError(f"{NAME}: {name} is not supported; no matrix of weights is ever computed")
    for name, given, allowed in (("fallback", fallback, ("error", "xla")), ("mask_form", mask_form, (None, *FORMS))):
        if given not in allowed:
            raise ValueError(f"{NAME}: {name} is {given!r}, expected one of {', '.join(map(repr, allowed))}")
    if mask_form is not None and mask is None:
        raise ValueError(f"{NAME}: mask_form is {mask_form!r}, and there is no mask")
    _check_shapes(query, key, value)
    is_batched = query.ndim == 4
    if not is_batched:
        query, key, value = query[None], key[None], value[None]
    arguments = Arguments(
        query,
        key,
        value,
        *_bias_and_mask(query, key, bias, mask, reads_mask=implementation is None),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        is_causal=bool(static_bool(f"{NAME}: is_causal", is_causal)),
        query_seq_lengths=_lengths("query_seq_lengths", query_seq_lengths, is_batched),
        key_value_seq_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, is_batched),
        local_window_size=_window(local_window_size),
        return_residual=bool(static_bool(f"{NAME}: return_residual", return_residual)),
        segment_ids=_segment_ids(query, key, segment_ids, is_batched),
        padding_segment_id=padding_id(f"{NAME}: padding_segment_id", padding_segment_id),
        max_segments=max_segments,
        sinks=None if sinks is None else jnp.asarray(sinks, jnp.float32),
        softcap=static_f32(f"{NAME}: softcap", softcap),
        mask_form=mask_form,
        k_start=_bounds("k_start", query, k_start, is_batched),
        k_end=_bounds("k_end", query, k_end, is_batched),
    )
    if segment_ids is None and (padding_segment_id, max_segments) != (None, None):
        raise ValueError(f"{NAME}: padding_segment_id or max_segments is given, and there are no segment_ids")
    if implementation is not None:
        results = by_jax(arguments, implementation)
    else:
        try:
            results = by_kernels(arguments)
        except (NotImplementedError, TracedScaleError) as error:
            if fallback == "error":
                raise type(error)(f"{error}; {_ALTERNATIVE}") from None
            results = by_jax(arguments, "xla")
    return results if is_batched else jax.tree.map(lambda x: x[0], results)


def _lengths(name: str, lengths: Any, is_batched: bool) -> Array | None:  # noqa: ANN401
    if lengths is None:
        return None
    lengths = index_operand(f"{NAME}: {name}", lengths)
    return lengths if is_batched else jnp.atleast_1d(lengths)


def _bounds(name: str, query: Array, bounds: Any, is_batched: bool) -> Array | None:  # noqa: ANN401
    """Bounds of the keys of each query as ``i32[B, T]``."""
    if bounds is None:
        return None
    bounds, expected = index_operand(f"{NAME}: {name}", bounds), query.shape[:2] if is_batched else query.shape[1:2]
    if bounds.shape != expected:
        raise ValueError(f"{NAME}: {name} has shape {list(bounds.shape)}, expected {list(expected)}")
    return bounds if is_batched else bounds[None]


def _bias_and_mask(query: Array, key: Array, bias: Any, mask: Any, *, reads_mask: bool) -> tuple[Array | None, Any]:  # noqa: ANN401
    """The bias and the mask with four dimensions; a mask whose values are known as a NumPy array."""
    batch, rows, heads, _ = query.shape
    sizes = batch, heads, rows, key.shape[1]
    if bias is not None:
        bias = as_4d(f"{NAME}: bias", jnp.asarray(bias), sizes)
    if mask is not None:
        if hasattr(mask, "__jax_array__") and not isinstance(mask, jax.Array):
            mask = mask.__jax_array__()
        # JAX traces operations on arrays, also on known ones, within `jax.jit`; it does not trace NumPy's.
        if not isinstance(mask, jax.Array) or (reads_mask and is_known(mask)):
            mask = np.asarray(mask)
        if mask.dtype != bool:
            raise ValueError(f"{NAME}: mask has dtype {mask.dtype}, expected bool; a bias is added to scores")
        mask = as_4d(f"{NAME}: mask", mask, sizes)
    return bias, mask


def _segment_ids(query: Array, key: Array, segment_ids: Any, is_batched: bool) -> tuple[Any, Any] | None:  # noqa: ANN401
    """The ids of queries and keys as ``[B, T]`` and ``[B, S]``, one object if they are the same."""
    if segment_ids is None:
        return None
    shapes = (x.shape[: 1 + is_batched] if is_batched else x.shape[1:2] for x in (query, key))
    queries, keys = id_arrays(f"{NAME}: segment_ids", segment_ids, *shapes)
    if is_batched:
        return queries, keys
    batched = queries[None]
    return batched, batched if keys is queries else keys[None]


def _window(size: Any) -> tuple[int, int] | None:  # noqa: ANN401
    """How many keys before and after its own position a query attends to."""
    if size is None:
        return None
    try:
        sides = tuple(size)
    except TypeError:  # one number
        sides = (size, size)
    if len(sides) != 2:
        raise ValueError(f"{NAME}: local_window_size is {size}, expected a number or (left, right)")
    left, right = (int(static_i64(f"{NAME}: local_window_size[{i}]", side)) for i, side in enumerate(sides))
    return left, right


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    """Validate what the packed form merges (batch and lengths) or would name by other shapes."""
    if query.ndim not in (3, 4) or key.ndim != query.ndim or value.ndim != query.ndim:
        shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in (("query", query), ("key", key), ("value", value)))
        raise ValueError(f"{NAME}: {shapes}, expected [B, T, N, H] or [T, N, H] for all three")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"{NAME}: value has shape {list(value.shape)}, expected {list(key.shape[:-1])} and any head dimension"
        )
    if query.ndim == 4 and query.shape[0] != key.shape[0]:
        raise ValueError(f"{NAME}: key has a batch of {key.shape[0]}, expected {query.shape[0]}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"{NAME}: key has head dimension {key.shape[-1]}, expected {query.shape[-1]}, the query's")
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{NAME}: key has {kv_heads} heads, expected a divisor of {heads}, the query's")
