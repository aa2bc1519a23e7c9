"""The decoder on several devices: its heads spread over them, or the pages of each sequence.

With heads, each device has some of the heads, of the feed-forward columns and of the cache (tensor parallelism): XLA
partitions the step by the shardings of weights and caches. With pages, each device has all weights and every n-th page
of every sequence: ``docs/context_parallel_decode.md``.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xla_attention.jax import context_parallel_paged_attention, context_parallel_slots, kv_cache_update

from .batch import StepBatch
from .config import LlamaConfig
from .model import Attend, make_caches, update_and_attend
from .weights import DecoderLayer, LlamaWeights

KINDS = ("heads", "pages")
# Matrices `[in, out]` whose columns, or rows, are spread with the heads.
BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_ROWS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Spread:
    """The devices, and what is spread over them, one of `KINDS`."""

    kind: str
    devices: tuple[jax.Device, ...]

    @cached_property
    def mesh(self) -> Mesh:
        """The devices as a mesh of one axis, which has the name of the kind."""
        return Mesh(np.array(self.devices), (self.kind,))

    def sharding(self, *dims: str | None) -> NamedSharding:
        """A sharding of the dimensions that are named after the axis."""
        return NamedSharding(self.mesh, PartitionSpec(*dims))

    def problem(self, config: LlamaConfig) -> str | None:
        """Why the model cannot be spread, or None."""
        if self.kind == "pages":
            return None
        sizes = {"key/value heads": config.num_kv_heads, "feed-forward columns": config.intermediate_size}
        return next((f"the model has {sizes[what]} {what}" for what in sizes if sizes[what] % len(self.devices)), None)

    def place_weights(self, weights: LlamaWeights) -> LlamaWeights:
        """The weights on the devices."""

        def of_layer(layer: DecoderLayer) -> DecoderLayer:
            specs = dict.fromkeys(layer._fields, self.sharding())
            if self.kind == "heads":
                specs |= dict.fromkeys(BY_COLUMNS, self.sharding(None, "heads"))
                specs |= dict.fromkeys(BY_ROWS, self.sharding("heads"))
            return DecoderLayer(**specs)

        shardings = jax.tree.map(lambda _: self.sharding(), weights)
        return jax.device_put(weights, shardings._replace(layers=tuple(map(of_layer, weights.layers))))

    def make_caches(self, config: LlamaConfig, num_pages: int, page_size: int, dtype: jnp.dtype) -> list[jax.Array]:
        """One zeroed cache per layer on the devices; a page that is spread is one page of each device."""
        count, dims = (1, (None, None, "heads")) if self.kind == "heads" else (len(self.devices), ("pages",))
        caches = make_caches(config, num_pages * count, page_size // count, dtype)
        return jax.device_put(caches, self.sharding(*dims))

    @property
    def attend(self) -> Attend:
        """What updates the cache of a layer and attends over it."""
        return update_and_attend if self.kind == "heads" else partial(attend_over_pages, self.mesh)


def attend_over_pages(
    mesh: Mesh, kv_cache: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, batch: StepBatch
) -> tuple[jax.Array, jax.Array]:
    """`update_and_attend` with the pages of each sequence on several devices.

    A page of the batch's block tables, of `n * page_size` tokens, is the page of this number on each of the n devices.
    """

    def on_device(
        kv_cache: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, batch: StepBatch
    ) -> tuple[jax.Array, jax.Array]:
        starts, num_seqs = batch.query_start_loc, batch.num_seqs
        slots = context_parallel_slots(
            batch.positions, batch.block_tables, kv_cache.shape[1], "pages", query_start_loc=starts, num_seqs=num_seqs
        )
        kv_cache = kv_cache_update(kv_cache, key, value, slots)
        sequences = batch.context_lens, batch.block_tables, starts, num_seqs
        out = context_parallel_paged_attention(
            query, kv_cache, *sequences, key, value, axis_name="pages", scale=query.shape[-1] ** -0.5
        )
        return out, kv_cache

    pages, whole = PartitionSpec("pages"), PartitionSpec()
    spread = jax.shard_map(on_device, mesh=mesh, in_specs=(pages, whole, whole, whole, whole), out_specs=(whole, pages))
    return spread(kv_cache, query, key, value, batch)
