"""Our kernel in sglang-jax. Importing this module does not import sglang-jax.

sglang-jax has no registry of kernels. Its attention backend calls one function, which it finds as an attribute of its
module: `install` replaces that attribute. The arguments are those of its main branch of 2026-08-21.
"""

import functools
from typing import Any

from ..jax import ragged_paged_attention_v3 as _ragged_paged_attention_v3
from ..jax._call import Array

__all__ = ["install", "ragged_paged_attention_v3"]


def ragged_paged_attention_v3(
    queries: Array,
    keys: Array,
    values: Array,
    kv_cache_fused: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    cu_kv_lens: Array,
    distribution: Array,
    custom_mask: Array | None = None,
    attention_sink: Array | float | None = None,
    *,
    causal: int = 1,
    mask_aligned_to_cu_kv: bool = False,
    pages_per_seq: int | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[Array, Array]:
    """`xla_attention.jax.ragged_paged_attention_v3` with the order of arguments of sglang-jax's kernel.

    Parameters
    ----------
    queries, keys, values, kv_cache_fused, kv_lens, page_indices, cu_q_lens, cu_kv_lens, distribution
        As there; `kv_cache_fused` is "interleaved" for every head dimension.
    custom_mask : Array, optional
        As there.
    attention_sink : Array or float, optional
    causal : int
        1 for a causal mask; 0 for `custom_mask`, or for none, as for encoders.
    mask_aligned_to_cu_kv : bool
    pages_per_seq : int, optional
        The most pages that a sequence can have, see there.
    **options
        The keyword arguments of the same name there.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As there.
    """
    return _ragged_paged_attention_v3(
        queries,
        keys,
        values,
        kv_cache_fused,
        kv_lens,
        page_indices,
        cu_q_lens,
        distribution,
        attention_sink,
        cu_kv_lens=cu_kv_lens,
        custom_mask=custom_mask,
        mask_aligned_to_cu_kv=mask_aligned_to_cu_kv,
        use_causal_mask=bool(causal),
        kv_layout="interleaved",
        pages_per_seq=pages_per_seq,
        **options,
    )


def install(*, pages_per_seq: int | None = None) -> None:
    """Let sglang-jax's attention backend (`--attention-backend fa`) call our kernel.

    Parameters
    ----------
    pages_per_seq : int, optional
        The most pages that a sequence can have: its context length, divided by the page size and rounded up. Without it
        each call gathers a table as wide as `page_indices`.

    Raises
    ------
    ImportError
        sglang-jax is not installed.
    """
    try:
        from sgl_jax.srt.layers.attention import flashattention_backend
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sgl_jax":
            raise
        text = "xla_attention.integrations.sglang_jax needs sglang-jax, which is not installed"
        raise ImportError(text) from error
    attend = functools.partial(ragged_paged_attention_v3, pages_per_seq=pages_per_seq)
    flashattention_backend.ragged_paged_attention_v3 = attend
