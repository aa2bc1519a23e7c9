"""context_parallel_attention in JAX: the function, its custom gradient, and the choice of a strategy."""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._documentation import documented
from .._options import kv_layout_number, length_hint
from . import _context_parallel_all_gather, _context_parallel_halo, _context_parallel_ring
from ._attention import output_dtype
from ._call import Array, pvary_all, static_bool, static_f32, static_i64
from ._context_parallel_all_to_all import attend_by_heads
from ._context_parallel_states import AxisName, num_devices_along
from ._context_parallel_steps import Config
from ._context_parallel_support import (
    NAME,
    validate_heads,
    validate_rows,
    validate_strategy,
    without_vacuous_windows,
)
from ._flash_attn_varlen import attend, attend_with_residuals, static_window, without_symbolic_zeros
from ._indices import index_operand, optional_index_operand
from ._varlen import forward
from ._varlen_types import Cotangents, Operands, Options
from ._zigzag_order import validate_zigzag


@documented("xla_gpu_flash_attn_varlen")
def context_parallel_attention(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Array,
    *,
    axis_name: AxisName,
    strategy: str = "all_gather",
    layout: str = "contiguous",
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    max_seqlen: int | None = None,
    seqused: Array | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Self-attention over packed sequences whose rows are spread over the devices of a mesh axis.

    To be called within ``jax.shard_map`` over `axis_name`, an axis of n devices. The result is that of
    `flash_attn_varlen` over the whole stream of T rows, up to rounding; ``docs/context_parallel.md`` says which
    strategy and layout suit which program. XLA's collectives move the data.

    Parameters
    ----------
    q : Array
        f16, bf16 or f32 ``[T/n, Hq, D]``: this device's rows.
    k, v : Array
        ``[T/n, Hkv, D]`` and ``[T/n, Hkv, Dv]``: the same rows, of q's dtype. For a forward pass alone, q may be
        f8e4m3fn, and k and v f8e4m3fn or f8e5m2, as in `flash_attn_varlen`.
    cu_seqlens : Array
        ``i32[B + 1]``: the first row of each sequence in the whole stream and, last, the end; the same on every device.
    axis_name : str or tuple of str
        The mesh axis, or several as one, that the rows are spread over.
    strategy : str
        ``"all_gather"`` gathers K and V; ``"ring"`` passes them around, or, for a causal window in the contiguous
        layout, only the rows that the window reaches on earlier devices; ``"all_to_all"`` exchanges rows for heads.
    layout : str
        The order in which the rows were put on the devices; nothing is reordered here. ``"contiguous"``: device r has
        the rows from ``r * T/n`` on. ``"zigzag"``: the rows are ``x[zigzag_order(cu_seqlens, n)]``, where each device
        has two of the 2 n chunks of every sequence, and so the same work under a causal mask.
    causal : bool
    window : (int, int)
        How many keys before and after its own position a query attends to; -1 for no limit.
    softmax_scale : float, optional
        ... ``D ** -0.5`` by default.
    softcap : float
        ... 0 switches it off.
    alibi_slopes : Array, optional
    sinks : Array, optional
        ... The same on every device.
    max_seqlen : int, optional
        The length of the longest sequence. It chooses kernels and tile sizes, never which rows or keys count.
    seqused : Array, optional
        ``i32[B]``: how many of the first rows of each sequence are used, the same on every device. Others may hold
        anything, are attended to by no query, and their results are 0 and -inf.
    deterministic : bool
        Whether the gradients have to be deterministic; the results always are.
    return_lse : bool
        Whether to return `softmax_lse` too.

    Returns
    -------
    out : Array
        ``[T/n, Hq, Dv]``, of q's dtype, or bf16 for q of 8 bits: this device's rows. Rows that attend to no key, and
        rows that belong to no sequence, are 0.
    softmax_lse : Array
        ``f32[Hq, T/n]``: natural logarithm of the softmax denominators, sinks included. Only with ``return_lse=True``.

    Raises
    ------
    ValueError
        Shapes or options do not fit together, an axis, strategy or layout does not exist, or the heads or, where
        `cu_seqlens` is known on the host, the sequences cannot be divided by the axis.
    TypeError
        An option that is a compile-time constant is traced.
    NotImplementedError
        A layout that the strategy does not have, a combination of dtypes that there is no kernel for, or a gradient
        that does not exist, such as that of the slopes.

    Notes
    -----
    Differentiable in q, k, v and the sinks, also through the log-sum-exp. Outputs and gradients of several steps are
    added in f32 and rounded once. The residuals are q, k, v, the output and the log-sum-exp of this device; only with
    ``"all_to_all"`` are they those of all rows and the device's share of the heads.

    The values of a traced `cu_seqlens` are not validated. In the zigzag layout each has to be a multiple of 2 n.

    Examples
    --------
    Two sequences of 16 and 8 rows, on a mesh of one device.

    >>> import functools, jax, jax.numpy as jnp, numpy as np
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> from xla_attention.jax import context_parallel_attention, zigzag_order
    >>> mesh = Mesh(np.array(jax.devices()[:1]), ("cp",))
    >>> starts = np.array([0, 16, 24])
    >>> attend = functools.partial(context_parallel_attention, axis_name="cp", strategy="ring", layout="zigzag")
    >>> attend = jax.shard_map(attend, mesh=mesh, in_specs=(P("cp"), P("cp"), P("cp"), P()), out_specs=P("cp"))
    >>> q, k, v = (jax.random.normal(jax.random.key(i), (24, 4, 64)) for i in range(3))
    >>> order = zigzag_order(starts, mesh.size)
    >>> jax.jit(attend)(q[order], k[order], v[order], starts).shape
    (24, 4, 64)
    """
    validate_strategy(strategy, layout)
    num_devices = num_devices_along(NAME, axis_name)
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    validate_rows(q, k, v, layout)
    window_left, window_right = static_window(window)
    longest = None if max_seqlen is None else int(static_i64("max_seqlen", max_seqlen))
    options = Options(
        batch_invariant=np.bool_(False),
        causal=static_bool("causal", causal),
        deterministic=static_bool("deterministic", deterministic),
        kv_layout=kv_layout_number(None),
        max_seqlen_k=length_hint(longest or 0),
        max_seqlen_q=length_hint(longest or 0),
        softcap=static_f32("softcap", softcap),
        softmax_scale=static_f32("softmax_scale", q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale),
        top_left=np.bool_(False),
        window_left=window_left,
        window_right=window_right,
        out_dtype=output_dtype(q.dtype, None),
        dense=False,
    )
    starts = index_operand("cu_seqlens", cu_seqlens)
    used = optional_index_operand("seqused", seqused)
    slopes, sinks = (None if x is None else jnp.asarray(x, jnp.float32) for x in (alibi_slopes, sinks))
    operands = Operands(q, k, v, starts, starts, used, None, used, alibi_slopes=slopes, sinks=sinks)
    # A call of the device's rows has the shapes and options of the whole stream, which the library validates here.
    jax.eval_shape(functools.partial(forward, options), operands)
    total = num_devices * q.shape[0]
    if layout == "zigzag" and (host := _on_host(cu_seqlens)) is not None:
        validate_zigzag(NAME, host, total, num_devices)
    options = without_vacuous_windows(options, total)
    config = Config(axis_name, num_devices, strategy, layout, longest, options)
    # Every device has its own results, also of operands that are the same on all of them.
    _, operands = pvary_all((jax.lax.axis_index(axis_name), operands))
    if strategy == "all_to_all":
        validate_heads(num_devices, q.shape[1], k.shape[1])
        out, lse = attend_by_heads(config, operands)
    elif q.shape[0] == 0:  # XLA does not gather arrays without rows
        out, lse = attend(options, operands, return_lse=True)
    else:
        out, lse = _attend(config, operands)
    return (out, lse) if bool(static_bool("return_lse", return_lse)) else out


def _on_host(cu_seqlens: Any) -> np.ndarray | None:  # noqa: ANN401
    """The starts, if they are known while the program is traced."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(cu_seqlens)):
        return None
    if isinstance(cu_seqlens, jax.Array) and not cu_seqlens.is_fully_addressable:
        return None
    return np.asarray(cu_seqlens)


def _strategy(config: Config) -> ModuleType:
    """The module with the strategy's `forward` and `backward`."""
    if config.strategy == "all_gather":
        return _context_parallel_all_gather
    has_halo = config.layout == "contiguous" and config.options.causal and config.options.window_left >= 0
    return _context_parallel_halo if has_halo else _context_parallel_ring


# Jitted, because JAX does not run a custom gradient with symbolic zeros within a shard_map that is not.
@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: Config, operands: Operands) -> tuple[Array, Array]:
    out, lse = _strategy(config).forward(config, operands)
    return out.astype(config.options.out_dtype), lse


def _attend_fwd(config: Config, primals: Operands) -> tuple[tuple[Array, Array], tuple]:
    # With the custom_vjp, so that a second derivative reaches `gradients`, which refuses it by name.
    call = functools.partial(_attend.__wrapped__, config)
    return attend_with_residuals(NAME, config.options, call, primals)


def _attend_bwd(config: Config, residuals: tuple, cotangents: tuple[Any, Any]) -> tuple[Operands]:
    operands, out, lse = residuals
    dout, dlse = without_symbolic_zeros(cotangents, out)
    # Otherwise XLA merges the transfers of K and V with those of the forward pass, and keeps all that was received; or
    # makes them at once, where jax.checkpoint has the forward pass run again.
    k, v, out, lse, dout = jax.lax.optimization_barrier((operands.k, operands.v, out, lse, dout))
    operands = operands._replace(k=k, v=v)
    grads = _strategy(config).backward(config, operands, Cotangents(dout, out, lse, dlse))
    dq, dk, dv = (x.astype(like.dtype) for x, like in zip(grads[:3], operands[:3], strict=True))
    return (Operands(dq, dk, dv, sinks=grads.dsinks),)


_attend.__wrapped__.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
