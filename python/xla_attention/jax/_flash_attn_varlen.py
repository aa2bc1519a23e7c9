"""flash_attn_varlen in JAX."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._documentation import documented
from .._options import (
    kv_layout_number,
    length_hint,
    reject_dropout,
    require_key_lengths,
    unsupported_gradient,
    validate_values,
)
from ._attention import output_dtype
from ._call import Array, pvary_all, scale_operand, static_bool, static_f32, static_i64
from ._indices import index_operand, optional_index_operand
from ._no_gradient import without_gradient
from ._sharding import reshard_like
from ._varlen import backward, forward
from ._varlen_types import Cotangents, Operands, Options, keys_are_in_pages


@documented("xla_gpu_flash_attn_varlen")
def flash_attn_varlen(
    q: Array,
    k: Array,
    v: Array | None,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    block_table: Array | None = None,
    kv_layout: str | None = None,
    leftpad_k: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    q_scale: Array | float | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    q_offset: Array | None = None,
    k_start: Array | None = None,
    k_end: Array | None = None,
    bias: Array | None = None,
    top_left: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out_dtype: Any = None,  # noqa: ANN401
    dropout_p: float = 0.0,
) -> Array | tuple[Array, Array]:
    """Attention of a ragged batch of query rows over packed keys, or over the pages of a cache.

    Sequence b has the query rows ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]`` and, with packed keys, the key rows
    ``cu_seqlens_k[b] : cu_seqlens_k[b + 1]``. Names and meaning follow ``flash_attn_varlen_func`` of flash-attn;
    ``docs/semantics.md#flash_attn_varlen`` defines the results, and ``docs/semantics.md#flash_attn_varlen_bwd`` the
    gradients.

    Parameters
    ----------
    q : Array
    k, v : Array
        ``[Tk, Hkv, D]`` and ``[Tk, Hkv, Dv]``; with a `block_table` ``[P, page_size, Hkv, D]`` and
        ``[P, page_size, Hkv, Dv]``, or with `kv_layout` the one buffer as k, and None as v. Their dtype is that of q;
        for f16 and bf16 queries it may also be f8e4m3fn or f8e5m2. Query head h reads KV head ``h // (Hq // Hkv)``.
    cu_seqlens_q, cu_seqlens_k : Array
        ``i32[B + 1]``: the first row of each sequence and, last, the end. `cu_seqlens_k` defaults to `cu_seqlens_q`
        for packed keys. With a `block_table`, `seqused_k` has the number of keys per sequence; without `seqused_k` it
        is ``cu_seqlens_k[b + 1] - cu_seqlens_k[b]``.
    max_seqlen_q, max_seqlen_k : int, optional
        Lengths of the longest sequences, rounded up to a power of two. They choose kernels and tile sizes, never which
        rows or keys count.
    softmax_scale : float, optional
        ... ``D ** -0.5`` by default.
    causal : bool
    window : (int, int)
        How many keys before and after its own position a query attends to; -1 for no limit.
    softcap : float
        ... 0 switches it off.
    seqused_q : Array, optional
    seqused_k : Array, optional
    block_table : Array, optional
    kv_layout : str, optional
        The layout of a cache with K and V in one buffer: ``"interleaved"`` ``[P, page_size, 2*Hkv, D]`` with
        K of head h at 2h and V at 2h+1, ``"stacked"`` ``[2, P, page_size, Hkv, D]``, ``"per_page"``
        ``[P, 2, page_size, Hkv, D]``. Needs a `block_table`.
    leftpad_k : Array, optional
    alibi_slopes : Array, optional
    sinks : Array, optional
    q_scale : Array or float, optional
    k_scale : Array or float, optional
    v_scale : Array or float, optional
    q_offset : Array, optional
        ``i32[B]``: query i of sequence b stands at key ``i + q_offset[b]``, for causal masks, windows and slopes. Any
        sign; for shards of longer sequences.
    k_start : Array, optional
    k_end : Array, optional
    bias : Array, optional
        ... It has a gradient. A bias of -inf hides a key; ``docs/semantics.md#bias`` has more.
    top_left : bool
    deterministic : bool
        Whether the gradients have to be deterministic; the results always are.
    batch_invariant : bool
    return_lse : bool
        Whether to return `softmax_lse` too.
    out_dtype : dtype, optional
        bf16 (the default) or f16 for f8e4m3fn queries; otherwise q's dtype (the default) or f32, for partial results
        that are merged. The gradients round a cotangent of f32 to q's dtype. For long f8e4m3fn sequences with D
        128 or 256, Hopper multiplies 8-bit numbers on tensor cores: the error of `out` is then about 2 %, that of
        `softmax_lse` up to 5e-4 (``docs/semantics.md#fp8-queries``).
    dropout_p : float
        Has to be 0, there is no dropout; flash-attn has this argument.

    Returns
    -------
    out : Array
        ``[Tq, Hq, Dv]``. Rows that attend to no key, and rows that belong to no sequence, are 0.
    softmax_lse : Array
        ``f32[Hq, Tq]``: natural logarithm of the softmax denominators, sinks included; -inf for rows that attend to
        neither a key nor a sink. Only with ``return_lse=True``.

    Raises
    ------
    ValueError
        Shapes or options do not fit together; the text names the operand and what was expected.
    TypeError
        An option that is a compile-time constant is traced.
    NotImplementedError
        A combination of dtypes, or a head dimension, that there is no kernel for; or dropout.

    Notes
    -----
    Lengths and page numbers stay on the device and are clamped there to the sizes of the buffers. 64-bit integers
    saturate to 32 bits; without ``jax_enable_x64``, however, JAX truncates NumPy's where they are arguments of
    ``jax.jit``.

    Examples
    --------
    Two sequences of 3 and 2 tokens, packed.

    >>> import jax, jax.numpy as jnp
    >>> from xla_attention.jax import flash_attn_varlen
    >>> q, k, v = (jax.random.normal(jax.random.key(i), (5, 4, 64)) for i in range(3))
    >>> out = flash_attn_varlen(q, k, v, jnp.array([0, 3, 5]), causal=True)
    >>> out.shape
    (5, 4, 64)
    """
    reject_dropout("flash_attn_varlen", "dropout_p", dropout_p)
    layout = kv_layout_number(kv_layout)
    validate_values(v, kv_layout, "an array")
    q, k = jnp.asarray(q), jnp.asarray(k)
    window_left, window_right = static_window(window)
    options = Options(
        batch_invariant=static_bool("batch_invariant", batch_invariant),
        causal=static_bool("causal", causal),
        deterministic=static_bool("deterministic", deterministic),
        kv_layout=layout,
        max_seqlen_k=_length_hint("max_seqlen_k", max_seqlen_k),
        max_seqlen_q=_length_hint("max_seqlen_q", max_seqlen_q),
        softcap=static_f32("softcap", softcap),
        softmax_scale=static_f32("softmax_scale", q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale),
        top_left=static_bool("top_left", top_left),
        window_left=window_left,
        window_right=window_right,
        out_dtype=output_dtype(q.dtype, out_dtype),
        dense=False,
    )
    operands = Operands(
        q,
        k,
        jnp.zeros((0,), k.dtype) if v is None else jnp.asarray(v),
        index_operand("cu_seqlens_q", cu_seqlens_q),
        _cu_seqlens_k(cu_seqlens_k, cu_seqlens_q, block_table, seqused_k),
        optional_index_operand("seqused_k", seqused_k),
        optional_index_operand("block_table", block_table),
        optional_index_operand("seqused_q", seqused_q),
        optional_index_operand("leftpad_k", leftpad_k),
        *(None if x is None else jnp.asarray(x, jnp.float32) for x in (alibi_slopes, sinks)),
        *(scale_operand(x) for x in (q_scale, k_scale, v_scale)),
        optional_index_operand("q_offset", q_offset),
        optional_index_operand("k_start", k_start),
        optional_index_operand("k_end", k_end),
        None if bias is None else jnp.asarray(bias),
    )
    return attend(options, operands, bool(static_bool("return_lse", return_lse)))


def static_window(window: Any, target: str = "xla_gpu_flash_attn_varlen") -> tuple[np.int64, np.int64]:  # noqa: ANN401
    """The attributes ``window_left`` and ``window_right`` of `target`."""
    if not isinstance(window, tuple | list | np.ndarray) or len(window) != 2:
        text = f"window is {window!r}, expected (left, right), two integers, -1 for no limit"
        raise ValueError(f"{target}: {text}")
    left, right = (static_i64(f"window[{i}]", side) for i, side in enumerate(window))
    return left, right


def _length_hint(name: str, length: int | None) -> np.int64:
    return length_hint(0 if length is None else int(static_i64(name, length)))


def _cu_seqlens_k(
    cu_seqlens_k: Array | None, cu_seqlens_q: Array, block_table: Array | None, seqused_k: Array | None
) -> Array:
    if cu_seqlens_k is not None:
        return index_operand("cu_seqlens_k", cu_seqlens_k)
    if block_table is None:
        return index_operand("cu_seqlens_q", cu_seqlens_q)
    require_key_lengths(block_table, seqused_k)
    return jnp.zeros((0,), jnp.int32)


def attend(options: Options, operands: Operands, return_lse: bool) -> Array | tuple[Array, Array]:
    """Attention of packed, paged or dense operands, jitted: eager calls are compiled per set of options and shapes."""
    out, lse = _attend(options, pvary_all(operands))
    return (out, lse) if return_lse else out


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, operands: Operands) -> tuple[Array, Array]:
    return forward(options, operands)


def _attend_fwd(options: Options, primals: Operands) -> tuple[tuple[Array, Array], tuple]:
    # Not `forward`: with the custom_vjp, a second derivative reaches `gradients`, which rejects it by name.
    call = functools.partial(_attend.__wrapped__, options)
    results, residuals = attend_with_residuals("flash_attn_varlen", options, call, primals)
    # The structure of a residual is static: None where the bias needs no gradient, which takes a separate kernel.
    has_bias_gradient = () if primals.bias is not None and primals.bias.perturbed else None
    return results, (*residuals, has_bias_gradient)


def attend_with_residuals(
    function: str, options: Options, call: Callable[[Operands], tuple[Array, Array]], primals: Operands
) -> tuple[tuple[Array, Array], tuple]:
    """The forward rule of the gradient of `call`, the attention of `function`, with symbolic zeros."""
    operands, perturbed = (jax.tree.map(operator.attrgetter(name), primals) for name in ("value", "perturbed"))
    _reject_gradients(function, options, operands, perturbed)
    out, lse = call(operands)
    if not perturbed.sinks:
        operands = operands._replace(sinks=None)  # the log-sum-exps include them
    return (out, lse), (operands, out, lse)


def without_symbolic_zeros(cotangents: tuple[Any, Any], out: Array) -> tuple[Array, Array | None]:
    """`dout` in the dtype of `out`, and `dlse`, None for zeros."""
    zero = jax.custom_derivatives.SymbolicZero
    dout, dlse = (None if isinstance(x, zero) else x for x in cotangents)
    return jnp.zeros_like(out) if dout is None else dout.astype(out.dtype), dlse


def _attend_bwd(options: Options, residuals: tuple, cotangents: tuple[Any, Any]) -> tuple[Operands]:
    operands, out, lse, has_bias_gradient = residuals
    out = out.astype(operands.q.dtype)
    dout, dlse = without_symbolic_zeros(cotangents, out)
    options = options._replace(bias_gradient=has_bias_gradient is not None)
    grads = gradients(options, operands, Cotangents(dout, out, lse, dlse))
    dq, dk, dv = map(reshard_like, grads[:3], operands[:3])
    dsinks, dbias = (
        None if gradient is None else reshard_like(gradient, of)
        for gradient, of in ((grads.dsinks, operands.sinks), (grads.dbias, operands.bias))
    )
    return (Operands(dq, dk, dv, sinks=dsinks, bias=dbias),)


# `backward`, whose own derivative is refused.
gradients = without_gradient(
    "the gradients of flash_attn_varlen, dot_product_attention and context_parallel_attention",
    'jax.nn.dot_product_attention, or ours with implementation="xla", has gradients of any order',
    num_static=1,
)(backward)

_attend.__wrapped__.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)


def _reject_gradients(function: str, options: Options, operands: Operands, perturbed: Operands) -> None:
    """Raise NotImplementedError for gradients that do not exist; `perturbed` has a flag per differentiated operand."""
    unsupported = unsupported_gradient(
        in_pages=keys_are_in_pages(options, operands),
        is_scaled=any(x is not None for x in (operands.q_scale, operands.k_scale, operands.v_scale)),
    )
    if unsupported is None and jnp.dtype(operands.q.dtype).itemsize == 1:
        unsupported = f"of {operands.q.dtype}; there are gradients of f32, f16 and bf16"
    if unsupported is None and perturbed.alibi_slopes:
        unsupported = "of alibi_slopes; pass jax.lax.stop_gradient(alibi_slopes)"
    if unsupported is not None:
        raise NotImplementedError(f"{function}: there is no gradient {unsupported}")
