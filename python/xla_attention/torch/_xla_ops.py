"""Our implementations behind torch_xla's own operators."""

import functools

import torch

from ._define import exists, fragment
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
    """Put our implementation behind ``torch.ops.xla.ragged_paged_attention`` for CPU and CUDA tensors.

    torch_xla implements it for TPUs. Its definition is kept where there is one (it comes with
    ``torch_xla.experimental.custom_kernel``); otherwise the operator is defined, with the schema of torch_xla 2.9.
    Further calls do nothing.

    Examples
    --------
    >>> import torch, xla_attention.torch
    >>> xla_attention.torch.provide_xla_ops()
    >>> pages, one, starts = torch.ones(2, 16, 2, 128), torch.tensor([1]), torch.tensor([0, 1])
    >>> torch.ops.xla.ragged_paged_attention(torch.ones(1, 4, 128), pages, one, torch.tensor([[1]]), starts, one).shape
    torch.Size([1, 4, 128])
    """
    library, name = fragment("xla"), "ragged_paged_attention"
    defined = exists("xla", name)
    if not defined:
        library.define(name + _SCHEMA)
        torch.library.register_fake(f"xla::{name}", ragged_paged_attention, lib=library)
    for key in ("CPU", "CUDA"):
        library.impl(name, ragged_paged_attention, key, allow_override=defined)
