"""The operators as JAX functions, on CUDA and CPU. ``docs/semantics.md`` defines what each of them computes.

Importing this module registers the custom-call targets with JAX's runtime. Every function works eagerly and under
``jax.jit``, ``jax.lax.scan``, ``jax.export`` (see `export_disabled_checks`) and ``jax.shard_map``.

`flash_attn_varlen` over packed keys, `dot_product_attention` and `context_parallel_attention` have gradients (reverse
mode), and `simple_add` is differentiable. Differentiating any other function raises NotImplementedError.

XLA partitions every function over the devices of a mesh: by KV heads, `mla_paged_attention` by query heads,
`dot_product_attention` also by its batch, `merge_attention_states` and `simple_add` by every dimension. Tokens, pages
and sequences are replicated; where they are sharded, XLA gathers them, with a `GatherWarning`.
`context_parallel_attention`, within ``jax.shard_map``, computes sequences whose tokens are sharded. Under ``jax.vmap``
every function stays one call, unless sinks, scales, ``cos_sin`` or stacked pages are batched: then the calls run one
after the other. ``docs/sharding.md`` has the details.

Lengths, page numbers, positions and slots may be NumPy, Python or JAX integers of any width. The targets read 32 bits:
a larger or smaller number saturates, and a slot that does not fit stays outside the cache. Arguments of ``jax.jit`` are
the exception: without ``jax_enable_x64`` JAX truncates NumPy's 64 bits before our function sees them.

Dimensions of the shapes: ``T`` packed query tokens, ``S`` or ``B`` sequence slots, ``M`` pages in a row of the block
table, ``P`` pages of the cache, ``Hq`` query heads, ``Hkv`` key/value heads (a divisor of ``Hq``), ``D`` head
dimension, ``Dv`` head dimension of the values where it may differ.
"""

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError("xla_attention.jax needs jax, which is not installed: pip install jax") from error

from ._context_parallel_attention import context_parallel_attention
from ._context_parallel_decode import context_parallel_paged_attention
from ._context_parallel_pages import context_parallel_block_tables, context_parallel_slots
from ._dot_product_attention import dot_product_attention
from ._flash_attn_varlen import flash_attn_varlen
from ._gather_kv_cache import gather_kv_cache
from ._kv_cache_update import kv_cache_update
from ._merge_attention_states import merge_attention_states
from ._mla_paged_attention import mla_paged_attention
from ._mla_paged_attention_update import mla_paged_attention_update
from ._paged_attention import paged_attention, ragged_paged_attention
from ._paged_attention_update import paged_attention_update
from ._ragged_paged_attention_v3 import ragged_paged_attention_v3
from ._register import export_disabled_checks, register_targets
from ._rope_kv_cache_update import rope_kv_cache_update
from ._sharding_warning import GatherWarning
from ._simple_add import simple_add
from ._tree_mask import pack_tree_mask, tree_mask_from_custom_mask, tree_mask_from_packed_custom_mask
from ._zigzag_order import inverse_zigzag_order, zigzag_order

register_targets()

__all__ = [
    "GatherWarning",
    "context_parallel_attention",
    "context_parallel_block_tables",
    "context_parallel_paged_attention",
    "context_parallel_slots",
    "dot_product_attention",
    "export_disabled_checks",
    "flash_attn_varlen",
    "gather_kv_cache",
    "inverse_zigzag_order",
    "kv_cache_update",
    "merge_attention_states",
    "mla_paged_attention",
    "mla_paged_attention_update",
    "pack_tree_mask",
    "paged_attention",
    "paged_attention_update",
    "ragged_paged_attention",
    "ragged_paged_attention_v3",
    "register_targets",
    "rope_kv_cache_update",
    "simple_add",
    "tree_mask_from_custom_mask",
    "tree_mask_from_packed_custom_mask",
    "zigzag_order",
]
