"""Our kernel in sglang-jax's attention backend, against sglang-jax's reference.

sglang-jax's releases are far behind its main branch: the test runs where a checkout of that (2026-08-21 or later) is
installed, `pip install ./sglang-jax/python`.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("sgl_jax.srt.layers.attention.flashattention_backend")

from sgl_jax.srt.kernels.ragged_paged_attention.ragged_paged_attention_v3 import ref_ragged_paged_attention
from sgl_jax.srt.layers.attention import flashattention_backend as backend
from sgl_jax.srt.layers.radix_attention import RadixAttention
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

from xla_attention.integrations import sglang_jax

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its older flax

HEADS, KV_HEADS, D, PAGE = 4, 2, 128, 4
NEW, KEYS = [1, 6, 3], [9, 6, 17]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(backend, "ragged_paged_attention_v3", backend.ragged_paged_attention_v3)  # restored afterwards
    sglang_jax.install(pages_per_seq=8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        yield mesh


def metadata():
    """Sequences whose page indices have no gaps, and the table of their pages."""
    used = [-(-keys // PAGE) for keys in KEYS]
    pages = np.random.default_rng(5).permutation(sum(used) + 2).astype(np.int32)
    own = backend.FlashAttentionMetadata()
    own.cu_q_lens = jnp.int32(np.cumsum([0, *NEW]))
    own.cu_kv_lens = jnp.int32(np.cumsum([0, *used]) * PAGE)
    own.page_indices = jnp.asarray(pages[: sum(used)])
    own.seq_lens, own.distribution = jnp.int32(KEYS), jnp.int32([1, 1, len(NEW)])
    starts = np.cumsum([0, *used])
    table = np.zeros((len(NEW), 8), np.int32)
    for b, count in enumerate(used):
        table[b, :count] = pages[starts[b] :][:count]
    return own, table, len(pages)


@pytest.mark.parametrize(
    ("options", "sinks"),
    [({}, None), ({"sliding_window_size": 5}, None), ({"logit_cap": 3.0}, None), ({}, np.linspace(-1, 1, HEADS))],
    ids=str,
)
def test_the_attention_backend_calls_our_kernel(installed, options, sinks):
    own, table, num_pages = metadata()
    rng = np.random.default_rng(0)
    numbers = (np.float32(rng.standard_normal((sum(NEW), n * D))) for n in (HEADS, KV_HEADS, KV_HEADS))
    q, k, v = map(jnp.asarray, numbers)
    cache = np.float32(rng.standard_normal((num_pages, PAGE, 2 * KV_HEADS, 1, D)))
    attention = backend.FlashAttention(HEADS, KV_HEADS, D, page_size=PAGE, mesh=installed)
    attention.forward_metadata = own
    layer = RadixAttention(HEADS, D, D**-0.5, KV_HEADS, layer_id=0, **options)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, spec_info=None)
    sinks = None if sinks is None else jnp.float32(sinks)

    @functools.partial(jax.jit, donate_argnums=3)
    def call(q, k, v, cache):
        pool = SimpleNamespace(get_fused_kv_buffer=lambda _: cache)
        return attention(q, k, v, layer, batch, pool, attention_sink=sinks)

    assert call.lower(q, k, v, cache).as_text().count("@xla_gpu_paged_attention_update") == 1
    out, updated = call(q, k, v, jnp.array(cache))

    # The new tokens are the last keys of their sequence.
    expected = cache.copy()
    for b, (start, new) in enumerate(zip(np.cumsum([0, *NEW]), NEW, strict=False)):
        for i in range(new):
            page, offset = divmod(KEYS[b] - new + i, PAGE)
            rows = (np.asarray(x)[start + i].reshape(KV_HEADS, D) for x in (k, v))
            expected[table[b, page], offset, :, 0] = np.stack([*rows], axis=1).reshape(-1, D)
    np.testing.assert_array_equal(updated, expected)
    reference = ref_ragged_paged_attention(
        q.reshape(-1, HEADS, D),
        *(jnp.asarray(expected[:, :, i::2, 0]) for i in (0, 1)),
        own.seq_lens,
        jnp.asarray(table),
        own.cu_q_lens,
        jnp.int32([len(NEW)]),
        sm_scale=D**-0.5,
        sliding_window=options.get("sliding_window_size"),
        soft_cap=options.get("logit_cap"),
        attention_sink=sinks,
    )
    np.testing.assert_allclose(np.asarray(out).reshape(-1, HEADS, D), reference, atol=2e-5)


def test_what_is_not_supported_is_refused(installed):
    own, _, num_pages = metadata()
    attention = backend.FlashAttention(HEADS, KV_HEADS, D, page_size=PAGE, mesh=installed)
    attention.forward_metadata = own
    layer = RadixAttention(HEADS, D, D**-0.5, KV_HEADS, layer_id=0)
    layer.xai_temperature_len = 1024
    pool = SimpleNamespace(get_fused_kv_buffer=lambda _: jnp.zeros((num_pages, PAGE, 2 * KV_HEADS, 1, D)))
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, spec_info=None)
    rows = (jnp.zeros((sum(NEW), n * D)) for n in (HEADS, KV_HEADS, KV_HEADS))
    with pytest.raises(NotImplementedError, match="xai_temperature_len is 1024"):
        attention(*rows, layer, batch, pool)
