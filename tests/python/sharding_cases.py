"""Cases for sharding_program.py by name, and the collectives that each may have."""

import numpy as np
from jax.sharding import PartitionSpec

from sharded_calls import (
    BY_HEAD,
    CACHES,
    HEADS,
    LAYOUTS,
    PACKED,
    REPLICATED,
    TREES,
    added,
    biased,
    by_pages,
    by_two_axes,
    decoded,
    dense,
    dense_with_sinks,
    latent_step_of,
    merged,
    over_both_axes,
    packed,
    packed_cache,
    paged_step,
    pages,
    projected,
    replicated_keys,
    scaled_step,
    shard_mapped,
    shard_mapped_rows,
)
from xla_attention.jax import (
    gather_kv_cache,
    kv_cache_update,
    mla_paged_attention,
    mla_paged_attention_update,
    paged_attention,
    paged_attention_update,
    rope_kv_cache_update,
)

CASES = {
    "packed, by heads": lambda _: packed(),
    "packed, deterministic, by heads": lambda _: packed(deterministic=True),
    "packed, key ranges": lambda _: packed(k_start=np.arange(40) % 5, k_end=np.arange(40) % 11 + 2),
    "packed, query offsets": lambda _: packed(q_offset=np.array([2, -1, 0]), window=(5, -1)),
    "packed, one KV head": lambda _: packed((8, 1))._replace(specs=(PACKED, REPLICATED, REPLICATED, BY_HEAD)),
    "packed, two KV heads": lambda _: packed((8, 2))._replace(specs=(PACKED, REPLICATED, REPLICATED, BY_HEAD)),
    "packed, KV heads by one axis": lambda _: by_two_axes(packed((8, 2))),
    "packed, by rows": lambda _: packed()._replace(specs=(PartitionSpec("heads"),) * 3 + (REPLICATED,)),
    "packed, projected": lambda _: projected(HEADS),
    "packed, projected, two KV heads": lambda _: projected((8, 2)),
    "packed, replicated keys": lambda _: replicated_keys(),
    "packed, shard_map": shard_mapped,
    "packed, shard_map over rows": shard_mapped_rows,
    "interleaved pages, by heads": lambda _: pages("interleaved"),
    "stacked pages, by heads": lambda _: pages("stacked"),
    "dense, by batch": lambda _: dense("batch"),
    "dense, by heads": lambda _: dense(None, None, "heads"),
    "dense, by batch and heads": lambda _: dense("batch", None, "heads"),
    "dense, sinks by heads": lambda _: dense_with_sinks(("batch", None, "heads"), "heads"),
    "dense, sinks by the axis of the batch": lambda _: dense_with_sinks(("batch",), "batch"),
    "dense, one KV head, by batch and heads": lambda _: dense("batch", None, "heads", heads=(8, 1)),
    "dense, bias by batch and heads": lambda _: biased("batch", None, "heads", bias_spec=("batch", "heads")),
    "dense, bias of heads": lambda _: biased(
        "batch", None, "heads", bias_shape=(1, 8, 17, 29), bias_spec=(None, "heads")
    ),
    "dense, bias of entries": lambda _: biased("batch", None, "heads", bias_shape=(4, 1, 17, 29), bias_spec=("batch",)),
    "dense, bias that all share": lambda _: biased("batch", None, "heads", bias_shape=(1, 1, 17, 29)),
    "dense, segments": lambda _: dense("batch", None, "heads", metadata="segments"),
    "dense, promised mask": lambda _: dense("batch", metadata="promise"),
    "dense, mask of keys": lambda _: dense("batch", None, "heads", metadata="mask"),
    **{f"update, {layout}": lambda _, x=layout: paged_step(kv_cache_update, x) for layout in CACHES},
    "update, stacked, by pages": lambda _: by_pages(paged_step(kv_cache_update, "stacked")),
    "update, interleaved, replicated rows": lambda _: paged_step(kv_cache_update, replicated=("key", "value")),
    **{f"gather, {layout}": lambda _, x=layout: paged_step(gather_kv_cache, x) for layout in CACHES},
    **{
        f"rope, {layout}": lambda _, x=layout: paged_step(rope_kv_cache_update, x)
        for layout in CACHES
        if layout != "split"
    },
    "paged": lambda _: paged_step(paged_attention),
    "paged, trees": lambda _: paged_step(paged_attention, tree_mask=TREES),
    "paged update, trees": lambda _: paged_step(paged_attention_update, tree_mask=TREES),
    **{f"update, scales, {layout}": lambda _, x=layout: scaled_step(kv_cache_update, x) for layout in LAYOUTS},
    "gather, scales": lambda _: scaled_step(gather_kv_cache),
    "paged, scales": lambda _: scaled_step(paged_attention),
    "paged update, scales": lambda _: scaled_step(paged_attention_update),
    "paged, replicated queries": lambda _: paged_step(paged_attention, replicated=("query",)),
    "paged, equal numbers of heads": lambda _: paged_step(paged_attention, heads=(4, 4)),
    "paged, cache split between K and V": lambda _: paged_step(paged_attention, heads=(8, 2)),
    "paged update": lambda _: paged_step(paged_attention_update, replicated=("key", "value")),
    "paged update, 4 query heads per KV head": lambda _: paged_step(
        paged_attention_update, heads=(16, 4), replicated=("key", "value")
    ),
    "paged, KV heads by one axis": lambda _: by_two_axes(paged_step(paged_attention, heads=(8, 2))),
    "paged update, KV heads by one axis": lambda _: by_two_axes(paged_step(paged_attention_update, heads=(8, 2))),
    **{
        f"rope, {layout}, KV heads by one axis": lambda _, x=layout: by_two_axes(
            paged_step(rope_kv_cache_update, x, heads=(8, 2))
        )
        for layout in ("interleaved", "stacked", "per_page")
    },
    "interleaved pages, KV heads by one axis": lambda _: by_two_axes(pages("interleaved", heads=(8, 2))),
    "paged update, by both axes": lambda _: over_both_axes(
        paged_step(paged_attention_update, replicated=("key", "value"))
    ),
    "paged, two KV heads per device": lambda _: by_two_axes(paged_step(paged_attention, heads=(8, 4))),
    "paged, cache split between K and V by one axis": lambda _: over_both_axes(
        paged_step(paged_attention, heads=(8, 2))
    ),
    "latent, by heads": lambda _: latent_step_of(mla_paged_attention),
    "latent update, by heads": lambda _: latent_step_of(mla_paged_attention_update),
    "latent update, by both axes": lambda _: over_both_axes(latent_step_of(mla_paged_attention_update)),
    "cache in words, interleaved": lambda _: packed_cache("interleaved"),
    "cache in words, concatenated": lambda _: packed_cache("concatenated"),
    "cache in words, not causal": lambda _: packed_cache("interleaved", use_causal_mask=False),
    "cache in words, scales per head": lambda _: packed_cache(
        "interleaved", k_scale=np.float32([0.5, 1, 2, 4]), v_scale=np.float32([4, 2, 1, 0.5])
    ),
    "cache in words, KV heads by one axis": lambda _: by_two_axes(packed_cache("interleaved", heads=(8, 2))),
    "decode step": lambda _: decoded(),
    "decode step, KV heads by one axis": lambda _: by_two_axes(decoded((8, 2))),
    "merge, by heads": lambda _: merged((None, "heads"), ("heads",)),
    "merge, by rows and elements": lambda _: merged(("batch", None, "heads"), (None, "batch")),
    "add, by two dimensions": lambda _: added(),
}

# The cases that only slow tests run: each resembles another one.
SLOW = {
    "packed, deterministic, by heads",
    "packed, one KV head",
    "packed, projected",
    "stacked pages, by heads",
    "dense, by batch",
    "dense, by heads",
    "dense, one KV head, by batch and heads",
    "update, per_page",
    "gather, per_page",
    "update, scales, stacked",
    "update, scales, per_page",
    "rope, per_page",
    "rope, interleaved, KV heads by one axis",
    "rope, per_page, KV heads by one axis",
    "paged, equal numbers of heads",
    "cache in words, concatenated",
    "cache in words, not causal",
    "interleaved pages, KV heads by one axis",
    "decode step",
}

# The collectives that programs need: gradients of replicated operands are summed, and so are those of K and V that
# several devices share.
EXPECTED_COLLECTIVES = {
    "packed, one KV head": {"all-reduce"},
    "packed, two KV heads": {"all-reduce"},
    "packed, KV heads by one axis": {"all-reduce"},
    "packed, by rows": {"all-gather"},
    "packed, projected": {"all-reduce"},
    "packed, projected, two KV heads": {"all-gather", "all-reduce"},
    "packed, replicated keys": {"all-gather"},
    "packed, shard_map over rows": {"all-reduce"},
    "dense, sinks by heads": {"all-reduce"},
    "dense, sinks by the axis of the batch": {"all-gather", "all-reduce"},
    "dense, one KV head, by batch and heads": {"all-reduce"},
    "dense, bias of heads": {"all-reduce"},
    "dense, bias of entries": {"all-reduce"},
    "dense, bias that all share": {"all-reduce"},
    "update, stacked, by pages": {"all-gather"},
    "paged, two KV heads per device": {"all-gather"},
    "paged, cache split between K and V": {"all-gather"},
    "paged, cache split between K and V by one axis": {"all-gather"},
}
# Programs in which XLA gathers operands because they are not sharded by heads that the mesh divides.
GATHERED = {
    "packed, by rows": "q float32[40, 8, 16], whose dimension 0 is sharded by mesh axis 'heads'; k",
    "update, stacked, by pages": "kv_cache float32[2, 6, 4, 4, 16], whose dimension 1 is sharded by mesh axis 'heads'.",
    "paged, two KV heads per device": "query float32[3, 8, 16], whose dimension 1 is sharded by mesh axis 'heads'.",
    "paged, cache split between K and V": "query float32[3, 8, 16], whose dimension 1 is sharded by mesh axis 'heads';",
    "paged, cache split between K and V by one axis": "kv_cache float32[6, 4, 4, 16], whose dimension 2",
}
# Programs that JAX rejects on meshes with explicit axes, because they reshape an array that is sharded within a head.
AUTOMATIC_AXES_ONLY = {"packed, projected, two KV heads"}
