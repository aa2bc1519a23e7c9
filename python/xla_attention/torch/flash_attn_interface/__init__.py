"""The functions of ``flash_attn.flash_attn_interface``, computed by this library.

Names, argument order and defaults are those of flash-attn 2.8.3, so that ``from flash_attn import flash_attn_func``
becomes ``from xla_attention.torch.flash_attn_interface import flash_attn_func``. Beyond flash-attn, tensors may be on
the CPU or on XLA devices, their dtype may be f32, the head dimension of v may differ, and pages may have any size.
``docs/flash_attn.md`` lists the differences.
"""

from ._dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from ._kvcache import flash_attn_with_kvcache
from ._varlen import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
