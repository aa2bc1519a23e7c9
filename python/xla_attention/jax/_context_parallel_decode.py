"""context_parallel_paged_attention in JAX."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from .._documentation import documented
from .._options import kv_layout_number, reject_kv_layout
from ._attention import output_dtype
from ._call import Array, scale_operand, static_bool
from ._context_parallel_decode_call import Scores, Static, attend
from ._context_parallel_states import AxisName, num_devices_along
from ._paged_attention import metadata, score_attributes

NAME = "context_parallel_paged_attention"


@documented("xla_gpu_paged_attention")
def context_parallel_paged_attention(
    query: Array,
    kv_cache: Array | tuple[Array, Array],
    context_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    num_seqs: Array | int,
    key: Array | None = None,
    value: Array | None = None,
    *,
    axis_name: AxisName,
    scale: float,
    gather_heads: bool = False,
    scatter_heads: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    q_scale: Array | float | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_layout: str | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out_dtype: Any = None,  # noqa: ANN401
) -> Array | tuple[Array, Array]:
    """`paged_attention` over a cache whose pages are spread over the n devices of a mesh axis.

    For use inside ``jax.shard_map``. Page p of each sequence is on device p mod n. Each device attends over its own
    pages, and one collective brings the outputs and their log-sum-exps together, which are merged in f32. The result
    is that of `paged_attention` over the whole cache, up to rounding. ``docs/context_parallel_decode.md`` has examples.

    Parameters
    ----------
    query : Array
        ... All query heads, the same on every device; with `gather_heads` this device's.
    kv_cache : Array or pair of Arrays
        This device's pages, with K and V in one buffer, see `kv_layout`, or in two, ``[P, page_size, Hkv, D]`` and
        ``[P, page_size, Hkv, Dv]``. Of the query's dtype, or f8e4m3fn or f8e5m2 under f16 or bf16 queries.
    context_lens : Array
        ... Of whole sequences, over all devices.
    block_tables : Array
        ``i32[S, M]``: this device's pages of each sequence, in order: entry i of device r is page ``i * n + r`` of the
        sequence. The tables of the devices may differ.
    query_start_loc : Array
    num_seqs : Array or int
        ... An int becomes a constant of the program, which is recompiled for each value.
    key, value : Array, optional
        ``[T, Hkv, D]`` and ``[T, Hkv, Dv]``: the keys and values of the query rows, all KV heads of the cache, the same
        on every device. With them the cache is read only up to the first new token of each sequence, whose later slots
        may hold anything, and the query rows of a sequence share one walk over its pages: pass them for chunks of
        prompts. Without them the new tokens have to be in the cache.
    axis_name : str or tuple of str
        The mesh axis, or axes, over which pages are spread.
    scale : float
    gather_heads : bool
        Whether `query` has only this device's ``Hq / n`` heads, in the order of the devices, as after a projection that
        is sharded by heads. They are gathered by a collective of their own.
    scatter_heads : bool
        Whether each device needs only its own ``Hq / n`` heads of the results, as before a projection that is sharded
        by heads. The collective is then an all-to-all instead of an all-gather, and moves one n-th of the bytes.
    sliding_window : int, optional
        ... Each query row then reads its pages apart from the other rows. The cache of a layer with a small window is
        better kept whole on every device.
    soft_cap : float, optional
    alibi_slopes : Array, optional
        Not supported.
    sinks : Array, optional
        ... Of all query heads, also with `gather_heads`. A sink counts once.
    q_scale : Array or float, optional
    k_scale : Array or float, optional
    v_scale : Array or float, optional
    kv_layout : str, optional
        The layout of a cache in one buffer: ``"interleaved"`` (the default), ``[P, page_size, 2*Hkv, D]`` with K of
        head h at index 2h and V at 2h+1; ``"stacked"``, ``[2, P, page_size, Hkv, D]``; ``"per_page"``,
        ``[P, 2, page_size, Hkv, D]``.
    batch_invariant : bool
    return_lse : bool
        Whether to return `softmax_lse` too.
    out_dtype : dtype, optional
        bf16 (the default) or f16 for f8e4m3fn queries; otherwise the query's dtype (the default) or f32, which the
        devices then exchange too.

    Returns
    -------
    out : Array
        ``[T, Hq, Dv]``, the same on every device; with `scatter_heads` ``[T, Hq / n, Dv]``, the heads of this device.
        Rows that attend to no key, and rows that belong to no sequence, are 0.
    softmax_lse : Array
        ``f32[Hq, T]``, or ``f32[Hq / n, T]``: natural logarithm of the softmax denominators, sinks included; -inf for
        rows that attend to neither a key nor a sink. Only with ``return_lse=True``.

    Raises
    ------
    ValueError
        The axis does not exist, it does not divide the query heads that `scatter_heads` spreads, or shapes, dtypes or
        options do not fit together; the text names the operand and what was expected.
    TypeError
        An option that is a compile-time constant is traced.
    NotImplementedError
        ALiBi slopes; or a combination of dtypes, or a head dimension, that there is no kernel for.

    Notes
    -----
    Lengths are clamped to the ``n * M`` pages of a sequence. With `key` and `value`, a length below the number of a
    sequence's rows counts as that number. There is no gradient.

    Update a donated cache before the attention: XLA copies a cache that is read and then updated. Before 0.10, JAX does
    not know that a result without `scatter_heads` is the same on every device, and ``jax.shard_map`` needs
    ``check_vma=False``.

    Examples
    --------
    One layer of a decode step, on as many devices as there are: the device that has the page of a new token stores it.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> from xla_attention.jax import context_parallel_paged_attention, context_parallel_slots, kv_cache_update
    >>> mesh = Mesh(jax.devices(), ("cp",))
    >>> def layer(kv_cache, query, key, value, lens, tables):
    ...     slots = context_parallel_slots(lens - 1, tables, kv_cache.shape[1], "cp")
    ...     kv_cache = kv_cache_update(kv_cache, key, value, slots)
    ...     sequences = lens, tables, jnp.arange(len(lens) + 1), len(lens)
    ...     return context_parallel_paged_attention(query, kv_cache, *sequences, axis_name="cp", scale=0.125), kv_cache
    >>> specs = P("cp"), P(), P(), P(), P(), P()
    >>> layer = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=(P(), P("cp"))), donate_argnums=0)
    >>> kv_cache, query, rows = jnp.zeros((8 * mesh.size, 16, 4, 64)), jnp.ones((2, 8, 64)), jnp.ones((2, 2, 64))
    >>> out, kv_cache = layer(kv_cache, query, rows, rows, jnp.array([1, 1]), jnp.array([[3], [5]]))
    >>> out.shape, float(out[0, 0, 0])
    ((2, 8, 64), 1.0)
    """
    if alibi_slopes is not None:
        text = "pages of a sequence are not contiguous on a device; paged_attention has ALiBi, with heads over devices"
        raise NotImplementedError(f"{NAME}: alibi_slopes is given, expected None: {text}")
    num_devices = num_devices_along(NAME, axis_name)
    attributes = score_attributes("xla_gpu_paged_attention", batch_invariant, scale, sliding_window, soft_cap)
    query = jnp.asarray(query)
    if isinstance(kv_cache, tuple | list):
        reject_kv_layout(kv_layout)
        caches = tuple(map(jnp.asarray, kv_cache))
        if len(caches) != 2:
            raise ValueError(f"{NAME}: kv_cache has {len(caches)} arrays, expected two, or one array")
    else:
        caches = (jnp.asarray(kv_cache),)
        kv_layout = kv_layout or "interleaved"
        kv_layout_number(kv_layout)
    form = _cache_form(kv_layout, caches)
    static = Static(
        axis_name,
        num_devices,
        *attributes,
        kv_layout=kv_layout,
        page_size=form.page_size,
        gather_heads=bool(static_bool("gather_heads", gather_heads)),
        scatter_heads=bool(static_bool("scatter_heads", scatter_heads)),
        out_dtype=output_dtype(query.dtype, out_dtype),
    )
    new_rows = _new_rows(query, key, value, form)
    heads = _num_query_heads(static, query)
    sequences = metadata(context_lens, block_tables, query_start_loc, num_seqs)
    _validate_metadata(*sequences)
    scores = Scores(
        None if sinks is None else jnp.asarray(sinks, jnp.float32), *map(scale_operand, (q_scale, k_scale, v_scale))
    )
    if sinks is not None and scores.sinks.shape != (heads,):
        raise ValueError(f"{NAME}: sinks has shape {list(scores.sinks.shape)}, expected [Hq={heads}]")
    out, lse = attend(static, query, caches, sequences, new_rows, scores)
    return (out, lse) if return_lse else out


class _Form(NamedTuple):
    """The sizes of a cache."""

    page_size: int
    num_heads: int
    dims: tuple[int, int]  # of keys and of values


def _cache_form(kv_layout: str | None, caches: tuple[Array, ...]) -> _Form:
    shapes = {
        None: "two arrays [P, page_size, Hkv, D]",
        "interleaved": "[P, page_size, 2*Hkv, D]",
        "stacked": "[2, P, page_size, Hkv, D]",
        "per_page": "[P, 2, page_size, Hkv, D]",
    }
    rank = 5 if kv_layout in ("stacked", "per_page") else 4
    if any(x.ndim != rank for x in caches):
        given = " and ".join(str(list(x.shape)) for x in caches)
        raise ValueError(f"{NAME}: kv_cache has shape {given}, expected {shapes[kv_layout]}")
    page_size, heads, dim = caches[0].shape[-3:]
    return _Form(page_size, heads // 2 if kv_layout == "interleaved" else heads, (dim, caches[-1].shape[-1]))


def _new_rows(query: Array, key: Array | None, value: Array | None, form: _Form) -> tuple[Array, Array] | None:
    if (key is None) != (value is None):
        given, missing = ("value", "key") if key is None else ("key", "value")
        raise ValueError(f"{NAME}: {given} is given and {missing} is None, expected both or neither")
    if key is None:
        return None
    rows = jnp.asarray(key), jnp.asarray(value)
    for name, array, dim in zip(("key", "value"), rows, form.dims, strict=True):
        expected = (query.shape[0], form.num_heads, dim)
        if array.shape != expected:
            sizes = ", ".join(f"{x}={y}" for x, y in zip(("T", "Hkv", "D"), expected, strict=True))
            raise ValueError(f"{NAME}: {name} has shape {list(array.shape)}, expected [{sizes}], as the cache has")
    return rows


def _num_query_heads(static: Static, query: Array) -> int:
    """The heads of all devices' queries."""
    if query.ndim != 3:
        raise ValueError(f"{NAME}: query has shape {list(query.shape)}, expected [T, Hq, D]")
    heads = query.shape[1] * (static.num_devices if static.gather_heads else 1)
    if static.scatter_heads and heads % static.num_devices:
        text = f"expected a multiple of the {static.num_devices} devices of axis {static.axis_name!r}"
        raise ValueError(f"{NAME}: query has {heads} heads, {text}, or scatter_heads=False")
    return heads


def _validate_metadata(context_lens: Array, block_tables: Array, query_start_loc: Array, num_seqs: Array) -> None:
    seqs = context_lens.shape[0] if context_lens.ndim == 1 else None
    ends = (seqs or 0) + 1
    for name, array, expected, fits in (
        ("context_lens", context_lens, "[S]", seqs is not None),
        ("block_tables", block_tables, f"[S={seqs}, M]", block_tables.shape[:-1] == (seqs,)),
        ("query_start_loc", query_start_loc, f"[S + 1 = {ends}]", query_start_loc.shape == (ends,)),
        ("num_seqs", num_seqs, "[] or [1]", num_seqs.shape in ((), (1,))),
    ):
        if not fits:
            raise ValueError(f"{NAME}: {name} has shape {list(array.shape)}, expected {expected}")
