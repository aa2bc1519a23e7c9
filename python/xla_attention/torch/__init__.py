"""The operators for PyTorch: eager on CPU and CUDA, in torch_xla's graphs, under ``torch.compile``.

``docs/semantics.md`` defines what each of them computes.

Importing this module defines ``torch.ops.xla_gpu.*`` and ``torch.ops.xla.flash_attn_varlen_op``. An operator that is
already defined is kept, and the log reports it. torch_xla is neither needed nor imported; when it is imported, before
or after this module, our handlers are registered with its runtime.
"""

from ..torch_xla import register_targets, use_cuda_plugin
from . import flash_attn_interface, vllm_style
from . import transformers as transformers  # not in __all__, because that is the name of the other library too
from ._flash_attn_varlen import flash_attn_varlen
from ._gather_kv_cache import gather_kv_cache
from ._import_hook import register_once_imported
from ._kv_cache_update import kv_cache_update, update_cache_
from ._merge_attention_states import merge_attention_states
from ._mla_paged_attention import mla_paged_attention
from ._mla_paged_attention_update import mla_paged_attention_update, mla_paged_attention_update_
from ._paged_attention import paged_attention, ragged_paged_attention
from ._paged_attention import paged_attention as xla_gpu_paged_attention
from ._paged_attention_update import paged_attention_update, paged_attention_update_
from ._rope_kv_cache_update import rope_kv_cache_update
from ._simple_add import simple_add
from ._tree_mask import pack_tree_mask
from ._xla_ops import provide_xla_ops

__all__ = [
    "flash_attn_interface",
    "flash_attn_varlen",
    "gather_kv_cache",
    "kv_cache_update",
    "merge_attention_states",
    "mla_paged_attention",
    "mla_paged_attention_update",
    "mla_paged_attention_update_",
    "pack_tree_mask",
    "paged_attention",
    "paged_attention_update",
    "paged_attention_update_",
    "provide_xla_ops",
    "ragged_paged_attention",
    "register_targets",
    "rope_kv_cache_update",
    "simple_add",
    "update_cache_",
    "use_cuda_plugin",
    "vllm_style",
    "xla_gpu_paged_attention",
]

register_once_imported()
