"""Whole programs on a mesh of two axes; test_mesh_programs.py runs it as a subprocess.

    mesh_program.py shardy|gspmd|explicit|mixed [program ...]

Prints a line of JSON per program: its name, the largest error against one device, the collectives in the compiled
program, the number of copies of a donated cache's shards, whether the cache stays in its memory, and more where a
program measures more. `explicit` is Shardy on a mesh with explicit axes; `mixed` has an explicit and an automatic one.
"""

import json
import re
import sys
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xla_attention.jax import (
    GatherWarning,
    dot_product_attention,
    export_disabled_checks,
    flash_attn_varlen,
    paged_attention,
    paged_attention_update,
)

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
LAYERS, PAGES, PAGE_SIZE, HEADS, HEAD_DIM, WIDTH = 3, 8, 4, (8, 4), 16, 32
SEQS = 4


def numbers(seed, *shape, scale=1.0):
    return np.float32(scale) * np.random.default_rng(seed).standard_normal(shape, np.float32)


def collectives(text):
    return sorted(name for name in COLLECTIVES if re.search(rf" {name}(-start)?\(", text))


def copies(text, shape):
    sizes = ",".join(map(str, shape))
    return sum(f"[{sizes}]" in line for line in text.splitlines() if " copy(" in line)


def addresses(arrays):
    return {shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(arrays) for shard in x.addressable_shards}


def error(actual, expected):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


class Programs:
    """The programs, for a mesh ``("data", "model")`` of 2 x 2 devices."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.is_explicit = bool(getattr(mesh, "explicit_axes", ()))
        kv_heads = HEADS[1]
        widths = [h * HEAD_DIM for h in (HEADS[0], kv_heads, kv_heads)]
        self.weights = (
            *(numbers(i, LAYERS, WIDTH, width, scale=0.2) for i, width in enumerate(widths)),
            numbers(4, LAYERS, widths[0], WIDTH, scale=0.2),
        )
        self.weight_specs = (*(P(None, None, "model"),) * 3, P(None, "model"))
        self.lens = np.array([5, 8, 3, 1], np.int32)
        self.tables = np.arange(8, dtype=np.int32).reshape(SEQS, 2)

    def put(self, tree, specs):
        """The arrays on the mesh, each in its own memory."""
        if isinstance(specs, P):
            return jax.tree.map(lambda x: jax.device_put(jnp.array(x), NamedSharding(self.mesh, specs)), tree)
        return tuple(self.put(x, spec) for x, spec in zip(tree, specs, strict=True))

    def project(self, rows, weights, heads):
        return (rows @ weights).reshape(*rows.shape[:-1], heads, HEAD_DIM)

    def row_parallel(self, rows, weights):
        """The product of arrays that are both sharded along the dimension that is summed over."""
        rows = rows.reshape(*rows.shape[:-2], -1)
        sharding = jax.typeof(rows).sharding if self.is_explicit else None
        if sharding is None or sharding.mesh.empty:
            return rows @ weights
        out_sharding = NamedSharding(sharding.mesh, P(*sharding.spec[:-1], None))
        return jnp.einsum("...i,ij->...j", rows, weights, out_sharding=out_sharding)

    def layer(self, rows, cache, weights, first_page):
        """A layer of a decoder: one new token of each sequence."""
        query, key, value = (
            self.project(rows, w, h) for w, h in zip(weights, (HEADS[0], *HEADS[1:] * 2), strict=False)
        )
        slots = self.tables[np.arange(SEQS), (self.lens - 1) // PAGE_SIZE] * PAGE_SIZE + (self.lens - 1) % PAGE_SIZE
        sequences = self.lens, self.tables + first_page, np.arange(SEQS + 1), np.array([SEQS])
        slots = slots + first_page * PAGE_SIZE
        out, cache = paged_attention_update(query, cache, *sequences, key, value, slots, scale=0.25)
        return rows + jnp.tanh(self.row_parallel(out, weights[3])), cache

    def report(self, function, operands, specs, donated=1, expected=None):
        """Run it on one device and on the mesh, with the caches ``operands[donated]`` donated."""
        if expected is None:
            expected = jax.jit(function)(*operands)
        placed = [self.put(x, spec) for x, spec in zip(operands, specs, strict=True)]
        compiled = jax.jit(function, donate_argnums=() if donated is None else donated).lower(*placed).compile()
        text = compiled.as_text()
        caches = [] if donated is None else jax.tree.leaves(placed[donated])
        before, shapes = addresses(caches), {x.sharding.shard_shape(x.shape) for x in caches}
        actual = jax.block_until_ready(compiled(*placed))
        return {
            "error": error(actual, expected),
            "collectives": collectives(text),
            "copies": sum(copies(text, shape) for shape in shapes),
            "in_place": all(x.is_deleted() for x in caches) and before <= addresses(actual),
        }

    def layers(self):
        """One cache per layer, each donated."""

        def step(rows, caches, weights):
            updated = []
            for i, cache in enumerate(caches):
                rows, cache = self.layer(rows, cache, [w[i] for w in weights], 0)
                updated.append(cache)
            return rows, updated

        caches = [numbers(9 + i, PAGES, PAGE_SIZE, 2 * HEADS[1], HEAD_DIM) for i in range(LAYERS)]
        specs = P(), P(None, None, "model"), self.weight_specs
        return self.report(step, (numbers(5, SEQS, WIDTH), caches, self.weights), specs)

    def scanned_layers(self):
        """jax.lax.scan over layers, whose pages are in one cache: layer i has the pages from i * PAGES on."""

        def step(rows, cache, weights):
            def body(carry, xs):
                return self.layer(*carry, xs[0], PAGES * xs[1]), None

            return jax.lax.scan(body, (rows, cache), (weights, jnp.arange(LAYERS)))[0]

        cache = numbers(9, LAYERS * PAGES, PAGE_SIZE, 2 * HEADS[1], HEAD_DIM)
        specs = P(), P(None, None, "model"), self.weight_specs
        return self.report(step, (numbers(5, SEQS, WIDTH), cache, self.weights), specs)

    def decode_loop(self):
        """100 steps with a program per step; each query is the last output."""
        steps = 100
        tables = np.arange(2 * 26, dtype=np.int32).reshape(2, 26)

        def step(query, cache, lens):
            slots = jnp.take_along_axis(tables, (lens // PAGE_SIZE)[:, None], 1)[:, 0] * PAGE_SIZE + lens % PAGE_SIZE
            new = query.reshape(2, HEADS[1], -1, HEAD_DIM)[:, :, 0]
            sequences = lens + 1, tables, np.arange(3), np.array([2])
            out, cache = paged_attention_update(query, cache, *sequences, new, jnp.sin(new), slots, scale=0.25)
            return out, cache, lens + 1

        def run(state):
            sizes, compiled = [], jax.jit(step, donate_argnums=(0, 1)).lower(*state).compile()
            memory = addresses(state[1])
            for _ in range(steps):
                state = jax.block_until_ready(compiled(*state))
                assert addresses(state[1]) == memory
                sizes.append(sum(x.nbytes for x in jax.live_arrays()))
            return state, compiled, sizes

        operands = (
            numbers(6, 2, HEADS[0], HEAD_DIM),
            numbers(7, 52, PAGE_SIZE, 2 * HEADS[1], HEAD_DIM),
            np.array([0, 3]),
        )
        operands = (*operands[:2], operands[2].astype(np.int32))
        expected, *_ = run(tuple(map(jnp.array, operands)))
        specs = P(None, "model"), P(None, None, "model"), P()
        actual, compiled, sizes = run(tuple(self.put(x, spec) for x, spec in zip(operands, specs, strict=True)))
        shape = actual[1].sharding.shard_shape(actual[1].shape)
        return {
            "error": error(actual, expected),
            "collectives": collectives(compiled.as_text()),
            "copies": copies(compiled.as_text(), shape),
            "in_place": True,  # asserted at each step
            "live_bytes_grow": max(sizes[1:]) - sizes[0],
        }

    def training(self):
        """The gradient of layers under jax.lax.scan and jax.checkpoint, with the batch and the heads sharded."""

        def loss(weights, rows):
            @jax.checkpoint
            def layer(rows, weights):
                heads = HEADS[0], *HEADS[1:] * 2
                q, k, v = (self.project(rows, w, h) for w, h in zip(weights, heads, strict=False))
                out = dot_product_attention(q, k, v, is_causal=True, local_window_size=5)
                return rows + jnp.tanh(self.row_parallel(out, weights[3])), None

            return jnp.sum(jax.lax.scan(layer, rows, weights)[0] ** 2)

        operands = self.weights, numbers(5, 4, 12, WIDTH, scale=0.1)
        return self.report(jax.grad(loss), operands, (self.weight_specs, P("data")), donated=None)

    def packed_training(self):
        """The same over packed sequences, which the devices of the data axis all compute."""
        starts = np.array([0, 5, 12])

        def loss(weights, rows):
            @jax.checkpoint
            def layer(rows, weights):
                heads = HEADS[0], *HEADS[1:] * 2
                q, k, v = (self.project(rows, w, h) for w, h in zip(weights, heads, strict=False))
                return rows + jnp.tanh(self.row_parallel(flash_attn_varlen(q, k, v, starts), weights[3])), None

            return jnp.sum(jax.lax.scan(layer, rows, weights)[0] ** 2)

        operands = self.weights, numbers(5, 12, WIDTH, scale=0.1)
        return self.report(jax.grad(loss), operands, (self.weight_specs, P()), donated=None)

    def page_pools(self):
        """Each group of the data axis has its own tokens, tables and pages; heads are sharded by the model axis."""
        query, cache = numbers(6, SEQS, HEADS[0], HEAD_DIM), numbers(7, 2 * PAGES, PAGE_SIZE, 2 * HEADS[1], HEAD_DIM)
        key, value = (numbers(i, SEQS, HEADS[1], HEAD_DIM) for i in (1, 2))
        tables = np.array([[0, 3], [5, 1], [2, 7], [6, 4]], np.int32)  # of two sequences per group
        last = self.lens - 1
        slots = tables[np.arange(SEQS), last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
        starts, num_seqs = np.array([0, 1, 2] * 2, np.int32), np.array([2, 2], np.int32)

        def step(query, cache, *metadata_and_rows):
            return paged_attention_update(query, cache, *metadata_and_rows, scale=0.25)

        # On one device: the second group's pages come after the first one's.
        group = np.arange(SEQS) // 2
        whole = self.lens, tables + PAGES * group[:, None], np.arange(SEQS + 1), np.array([SEQS])
        expected = jax.jit(step)(query, cache, *whole, key, value, slots + PAGES * PAGE_SIZE * group)

        rows, pages, each = P("data", "model"), P("data", None, "model"), P("data")
        specs = rows, pages, each, each, each, each, rows, rows, each
        sharded = jax.shard_map(step, mesh=self.mesh, in_specs=specs, out_specs=(rows, pages))
        operands = query, cache, self.lens, tables, starts, num_seqs, key, value, slots
        return self.report(sharded, operands, specs, expected=expected)

    def partial_shard_map(self):
        """jax.shard_map over the data axis alone: XLA gathers the heads, with a warning."""
        starts = np.array([0, 5, 6])

        def attend(q, k, v):
            return flash_attn_varlen(q, k, v, starts, causal=True)

        operands = [numbers(i, 12, heads, HEAD_DIM) for i, heads in enumerate((HEADS[0], *HEADS[1:] * 2))]
        halves = [jax.jit(attend)(*(x[i : i + 6] for x in operands)) for i in (0, 6)]
        options = {"in_specs": P("data"), "out_specs": P("data"), "axis_names": {"data"}}
        reports = []
        for check_vma in (True, False):
            sharded = jax.shard_map(attend, mesh=self.mesh, check_vma=check_vma, **options)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                specs = (P("data", "model"),) * 3
                report = self.report(sharded, operands, specs, donated=None, expected=np.concatenate(halves))
            reports.append({**report, "gathers": [str(x.message) for x in caught if x.category is GatherWarning]})
        assert reports[0] == reports[1]
        return reports[0]

    def exported(self):
        """A program of jax.jit, or of jax.shard_map where the axes are automatic, through jax.export and back."""
        lens, tables = self.lens, self.tables

        def attend(query, cache):
            return paged_attention(query, cache, lens, tables, np.arange(SEQS + 1), np.array([SEQS]), scale=0.25)

        specs = P(None, "model"), P(None, None, "model")
        on_mesh = attend
        if not self.is_explicit:
            on_mesh = jax.shard_map(attend, mesh=self.mesh, in_specs=specs, out_specs=specs[0])
        operands = numbers(6, SEQS, HEADS[0], HEAD_DIM), numbers(7, PAGES, PAGE_SIZE, 2 * HEADS[1], HEAD_DIM)
        placed = [self.put(x, spec) for x, spec in zip(operands, specs, strict=True)]
        exported = jax.export.export(jax.jit(on_mesh), disabled_checks=export_disabled_checks())(*placed)
        again = jax.export.deserialize(exported.serialize())
        report = self.report(again.call, operands, specs, donated=None, expected=jax.jit(attend)(*operands))
        return {**report, "devices": again.nr_devices}


PROGRAMS = [
    "layers",
    "scanned_layers",
    "decode_loop",
    "training",
    "packed_training",
    "page_pools",
    "partial_shard_map",
    "exported",
]


if __name__ == "__main__":
    partitioning, *names = sys.argv[1:]
    if partitioning == "gspmd":
        jax.config.update("jax_use_shardy_partitioner", False)
    explicit = {"explicit": (True, True), "mixed": (True, False)}.get(partitioning)
    options = {}
    if explicit:
        types = jax.sharding.AxisType
        options["axis_types"] = tuple(types.Explicit if is_explicit else types.Auto for is_explicit in explicit)
    programs = Programs(Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"), **options))
    for name in names or PROGRAMS:
        print(json.dumps({"program": name, **getattr(programs, name)()}), flush=True)
