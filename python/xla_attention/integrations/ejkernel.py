"""Our kernels in ejkernel's registry, and so in EasyDeL. Importing this module does not import ejkernel.

Signatures and meaning are those of ejkernel 0.0.80.3; 0.0.78, which EasyDeL 0.3.0 pins, has the same. An argument
that is not supported raises its own error, with our text. Parameters of tuning are ignored; the functions do not
delete them, because the registry takes a deleted parameter for one that is not supported.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..jax import flash_attn_varlen, paged_attention, ragged_paged_attention_v3
from ..jax._call import Array

__all__ = ["register"]

_PLATFORMS = ("cuda", "triton", "xla")


def register(
    algorithms: Sequence[str] | None = None, *, platforms: Sequence[str] = ("cuda", "triton"), priority: int = 10
) -> None:
    """Register our operators with ejkernel, as the implementations that it prefers.

    Parameters
    ----------
    algorithms : sequence of str, optional
        Of "ragged_page_attention_v3", "ragged_page_attention_v2" and "unified_attention"; all by default.
    platforms : sequence of str
        In whose place ours come: "cuda" and "triton" are what ejkernel selects on NVIDIA GPUs. "xla" is what it selects
        on the CPU, and also where it has nothing else: on a TPU, where ours do not run.
    priority : int
        The registry prefers the highest; ejkernel's own have 0.

    Raises
    ------
    ImportError
        ejkernel is not installed.
    ValueError
        An unknown algorithm or platform.

    Notes
    -----
    ejkernel measures the candidates of a call without a `cfg`, and keeps what it has chosen on disk:
    ``platform="cuda"`` in the call, or in the `cfg`, makes it ours.
    """
    try:
        from ejkernel.kernels import kernel_registry
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ejkernel":
            raise
        text = "xla_attention.integrations.ejkernel needs ejkernel, which is not installed: pip install ejkernel"
        raise ImportError(text) from error
    for name, given, known in (
        ("algorithms", algorithms or (), _IMPLEMENTATIONS),
        ("platforms", platforms, _PLATFORMS),
    ):
        unknown = [x for x in given if x not in known]
        if unknown:
            raise ValueError(f"register: {name} has {unknown}, expected some of {list(known)}")
    for algorithm in algorithms or _IMPLEMENTATIONS:
        function = _IMPLEMENTATIONS[algorithm]
        ours = [x for x in kernel_registry.list_implementations(algorithm) if _is(x.implementation, function)]
        for platform in platforms:
            if not any(x.platform == platform and x.priority == priority for x in ours):
                # Any backend: asked for a platform by name, ejkernel may look for the backend of JAX's default device.
                kernel_registry.register(algorithm, platform, "any", priority=priority)(function)


def _is(implementation: Any, function: Any) -> bool:  # noqa: ANN401
    """Whether the registry's wrapper is that of `function`."""
    return getattr(implementation, "__wrapped__", None) is function


def _ragged_page_attention_v3(
    queries: Array,
    keys: Array,
    values: Array,
    kv_cache: Array,
    kv_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    distribution: Array,
    softmax_aux: Array | None = None,
    *,
    softmax_scale: Array | float | None = 1.0,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    q_scale: Array | float | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    chunk_prefill_size: int | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> tuple[Array, Array]:
    """`ragged_paged_attention_v3` with the names of ejkernel, which converts new rows to the cache's dtype."""
    # With head dimension 64, EasyDeL's caches have K and V in one row. Where both forms have one shape, ejkernel's own
    # kernels for GPUs have them in two.
    rows, packing = kv_cache.shape[-3:-1]
    is_one_row = queries.shape[-1] == 64 and rows * packing < 2 * keys.shape[-2]
    return ragged_paged_attention_v3(
        queries,
        *(jnp.asarray(x).astype(kv_cache.dtype) for x in (keys, values)),
        kv_cache,
        kv_lens,
        block_tables,
        query_start_loc,
        distribution,
        softmax_aux,
        sm_scale=queries.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        sliding_window=sliding_window,
        soft_cap=logits_soft_cap,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_layout="concatenated" if is_one_row else "interleaved",
    )


def _ragged_page_attention_v2(
    queries: Array,
    kv_pages: Array,
    context_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    num_seqs: Array | int,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    compute_dtype: Any = jnp.bfloat16,  # noqa: ANN401
    optimized: bool = False,
    sliding_window: int | None = None,
    softmax_aux: Array | None = None,
    mask_value: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Array:
    """`paged_attention` with the names of ejkernel. It computes in f32, whatever `compute_dtype` is."""
    return paged_attention(
        queries,
        kv_pages,
        context_lens,
        block_tables,
        query_start_loc,
        num_seqs,
        scale=queries.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        sliding_window=sliding_window,
        soft_cap=logits_soft_cap,
        sinks=softmax_aux,
    )


def _unified_attention(
    queries: Array,
    key_cache: Array,
    value_cache: Array,
    kv_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    alibi_slopes: Array | None = None,
    qq_bias: Array | None = None,
    softmax_aux: Array | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    seq_threshold_3d: int | None = None,
    num_par_softmax_segments: int | None = None,
    block_dim: int = 128,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Array:
    """`flash_attn_varlen` over pages with the names of ejkernel, where 0 switches the window and the soft cap off."""
    if qq_bias is not None:
        raise NotImplementedError("qq_bias is not supported: expected None, there is no bias given as an array")
    if not causal:
        raise NotImplementedError("causal=False is not supported, as in ejkernel's own kernels")
    if alibi_slopes is not None and (softmax_aux is not None or logits_soft_cap):
        # ejkernel adds the bias before the cap, relative to the first new token: a constant per row that a sink feels.
        text = "alibi_slopes with softmax_aux or logits_soft_cap is not supported: expected only one of them"
        raise NotImplementedError(text)
    return flash_attn_varlen(
        queries,
        key_cache,
        value_cache,
        query_start_loc,
        seqused_k=kv_lens,
        block_table=block_tables,
        causal=True,
        window=(sliding_window - 1 if sliding_window and sliding_window > 0 else -1, -1),
        softcap=logits_soft_cap or 0.0,
        softmax_scale=softmax_scale,
        alibi_slopes=alibi_slopes,
        sinks=softmax_aux,
    )


_IMPLEMENTATIONS = {
    "ragged_page_attention_v3": _ragged_page_attention_v3,
    "ragged_page_attention_v2": _ragged_page_attention_v2,
    "unified_attention": _unified_attention,
}
