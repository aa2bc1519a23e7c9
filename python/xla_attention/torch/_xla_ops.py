"""`provide_xla_ops`, which implements torch_xla's ragged paged attention operator."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ._define import fragment
from ._paged_attention import ragged_paged_attention

# torch_xla 2.9's (torch_xla/experimental/custom_kernel.py).
_SCHEMA = (
    "(Tensor q, Tensor kv_pages, Tensor kv_lens, Tensor page_indices, Tensor cu_q_lens, Tensor num_seqs, "
    "float sm_scale=1, int? sliding_window=None, float? soft_cap=None, float? mask_value=None, float? k_scale=None, "
    "float? v_scale=None, bool use_kernel=True, int? num_kv_pages_per_block=None, int? num_queries_per_block=None, "
    "int? vmem_limit_bytes=None) -> Tensor"
)


@functools.cache
def provide_xla_ops() -> None:
    """Implement ``torch.ops.xla.ragged_paged_attention`` by `paged_attention`, on CPU, CUDA and XLA tensors.

    torch_xla defines the operator when ``torch_xla.experimental.custom_kernel`` is imported, so this imports it where
    torch_xla is installed; otherwise this defines the operator, with the schema of torch_xla 2.9. On TPUs torch_xla's
    kernel stays. Further calls do nothing.

    Examples
    --------
    >>> import torch, xla_attention.torch
    >>> xla_attention.torch.provide_xla_ops()
    >>> pages, one, starts = torch.ones(2, 16, 2, 128), torch.tensor([1]), torch.tensor([0, 1])
    >>> torch.ops.xla.ragged_paged_attention(torch.ones(1, 4, 128), pages, one, torch.tensor([[1]]), starts, one).shape
    torch.Size([1, 4, 128])
    """
    library, name = fragment("xla"), "ragged_paged_attention"
    try:
        from torch_xla.experimental import custom_kernel
    except ImportError:
        # torch_xla is not installed, or not for this torch.
        library.define(name + _SCHEMA)
        torch.library.register_fake(f"xla::{name}", ragged_paged_attention, lib=library)
    else:
        on_xla = functools.partial(_on_xla, custom_kernel.ragged_paged_attention_xla)
        with warnings.catch_warnings():
            # torch warns when a process first overrides a kernel.
            warnings.filterwarnings("ignore", ".*other operators may also be overridden", UserWarning)
            library.impl(name, on_xla, "XLA", allow_override=True)
    for key in ("CPU", "CUDA"):
        library.impl(name, ragged_paged_attention, key)


def _on_xla(on_tpu: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401
    """Our implementation, or `on_tpu` where the XLA device is a TPU."""
    from torch_xla import runtime

    run = on_tpu if runtime.device_type() == "TPU" else ragged_paged_attention
    return run(*arguments, **options)
