"""flash_attn_varlen and paged_attention against torch's scaled_dot_product_attention on the CPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from batches import batch, varlen
from torch_side import torch
from xla_attention.jax import flash_attn_varlen, paged_attention

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def sdpa(q, k, v, **options):
    """`[rows, heads, D]` in and out, in f64."""
    q, k, v = (torch.from_numpy(np.asarray(x, np.float64)).transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(0, 1).numpy()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 128), (96, 40)])
def test_packed_sequences_of_equal_lengths(platform, dtype, causal, d, dv):
    lengths = [40, 1, 33]
    (q, k, v, starts, _), _ = varlen([(n, n) for n in lengths], heads=(8, 2), d=d, dv=dv, dtype=dtype)
    out = np.asarray(flash_attn_varlen(q, k, v, starts, causal=causal)).astype(np.float64)
    for start, n in zip(np.asarray(starts), lengths, strict=False):
        rows = slice(start, start + n)
        wanted = sdpa(q[rows], k[rows], v[rows], is_causal=causal)
        np.testing.assert_allclose(out[rows], wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_chunks_over_pages(platform, dtype):
    sequences = [(5, 50), (1, 33), (16, 16)]
    operands = batch(sequences, page_size=8, dtype=dtype)
    out = np.asarray(paged_attention(*operands, scale=0.125)).astype(np.float64)
    query, cache, _, tables, starts, _ = operands
    for b, (rows, keys) in enumerate(sequences):
        stored = jnp.concatenate([cache[page] for page in tables[b, : -(-keys // 8)]])[:keys]
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        mine = slice(int(starts[b]), int(starts[b]) + rows)
        wanted = sdpa(query[mine], stored[:, 0::2], stored[:, 1::2], attn_mask=seen, scale=0.125)
        np.testing.assert_allclose(out[mine], wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
