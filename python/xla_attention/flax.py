"""`attention_fn` for the attention modules of Flax, linen and nnx. Importing this module does not import flax."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from .jax import dot_product_attention
from .jax._call import Array, static_bool
from .jax._masks import is_known

__all__ = ["attention_fn"]


def attention_fn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,  # noqa: ANN401
    precision: Any = None,  # noqa: ANN401
    module: Any = None,  # noqa: ANN401
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,  # noqa: ANN401
    attn_weights_value_einsum: Any = None,  # noqa: ANN401
    is_causal: bool = False,
    *,
    causal: bool = False,
    mask_form: str | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    fallback: str = "error",
) -> Array:
    """Attention for ``flax.linen.MultiHeadDotProductAttention`` and ``flax.nnx.MultiHeadAttention``.

    Pass it as the module's ``attention_fn``, with options of its own by ``functools.partial``. The arguments up to
    `is_causal` are those that the modules pass. `xla_attention.jax.dot_product_attention` computes the result;
    ``docs/jax_libraries.md`` has recipes.

    Parameters
    ----------
    query : Array
        ``[batch..., T, N, H]`` with any number of batch dimensions.
    key, value : Array
        ``[batch..., S, K, H]``, K a divisor of N.
    bias : Array, optional
        Broadcastable to ``[batch..., N, T, S]``, added to the scaled scores. It has a gradient.
    mask : Array, optional
        Broadcastable to ``[batch..., N, T, S]``, of any dtype: a query attends to a key where it is not 0. Masks whose
        values are known (made outside of ``jax.jit``) are recognised as causal, windows and padding. Of traced ones,
        those of keys are computed, which includes those of the modules' decoding caches, and those with a `mask_form`;
        others become a bias, which is slower.
    broadcast_dropout, dropout_rng, dropout_rate, deterministic
        There is no dropout: an error if `dropout_rate` is not 0 and `deterministic` is not True.
    dtype : dtype, optional
        To which query, key and value are converted; by default, their common dtype.
    precision, force_fp32_for_softmax
        Ignored: products are accumulated in f32, and the softmax is computed in f32.
    module, qk_attn_weights_einsum, attn_weights_value_einsum
        Not supported: the weights, which ``sow_weights=True`` asks for, are never materialised.
    is_causal : bool
        As nnx passes it: query t attends to keys up to t.
    causal : bool
        The same, to be set by ``functools.partial``: nnx would replace an `is_causal` that is set there.
    mask_form : str, optional
        ``"causal"`` or ``"padding"``: what a traced mask is. The device compares the two, and the results of an entry
        of the batch whose mask has another form are NaN. With one query, both are one range of keys.
    local_window_size, softcap, sinks, fallback
        As in `xla_attention.jax.dot_product_attention`.

    Returns
    -------
    Array
        ``[batch..., T, N, H]``. A query that attends to no key gives 0, where Flax gives the mean of all values.

    Raises
    ------
    ValueError
        Shapes or options do not fit together.
    NotImplementedError
        Dropout, sown weights, custom einsums; with ``fallback="error"`` a dtype or head dimension that there is no
        kernel for.

    Examples
    --------
    >>> import functools, jax.numpy as jnp
    >>> from xla_attention.flax import attention_fn
    >>> x = jnp.ones((2, 16, 4, 64))
    >>> functools.partial(attention_fn, causal=True)(x, x, x, deterministic=True).shape
    (2, 16, 4, 64)
    """
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    if not query.ndim == key.ndim == value.ndim >= 3:
        shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in (("query", query), ("key", key), ("value", value)))
        raise ValueError(f"attention_fn: {shapes}, expected [batch..., T, N, H] for all three")
    batch = query.shape[:-3]
    if mask is not None:
        # NumPy's operations keep a known mask known within jax.jit.
        mask = np.asarray(mask) if is_known(mask) else mask
        mask = _one_batch_dimension("mask", mask != 0, batch)
    if bias is not None:
        bias = _one_batch_dimension("bias", jnp.asarray(bias), batch)
    if len(batch) > 1:
        if any(x.shape[:-3] != batch for x in (key, value)):
            raise ValueError(f"attention_fn: key {list(key.shape)} has another batch than query {list(query.shape)}")
        query, key, value = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
    out = dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=static_bool("attention_fn: is_causal", is_causal) | static_bool("attention_fn: causal", causal),
        local_window_size=local_window_size,
        sinks=sinks,
        softcap=softcap,
        mask_form=None if mask is None else mask_form,
        fallback=fallback,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        deterministic=deterministic,
        precision=precision,
        force_fp32_for_softmax=force_fp32_for_softmax,
        module=module,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
    return out.reshape(*batch, *out.shape[-3:]) if len(batch) > 1 else out


def _one_batch_dimension(name: str, array: Any, batch: tuple) -> Any:  # noqa: ANN401
    """``[batch..., N, T, S]`` with up to one batch dimension; missing dimensions are leading ones."""
    if len(batch) <= 1 or array.ndim <= 3:
        return array
    leading = array.shape[:-3]
    if len(leading) > len(batch):
        raise ValueError(f"attention_fn: {name} has shape {list(array.shape)}, expected [{list(batch)}..., N, T, S]")
    if set(leading) == {1}:
        return array.reshape(array.shape[-4:])
    numpy = np if isinstance(array, np.ndarray) else jnp
    return numpy.broadcast_to(array, (*batch, *array.shape[-3:])).reshape(-1, *array.shape[-3:])
