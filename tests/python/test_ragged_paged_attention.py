"""ragged_paged_attention against the reference implementation of JAX's TPU kernel, whose signature it has."""

import functools
import inspect

import jax
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as tpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ref_ragged_paged_attention

from batches import batch
from xla_attention.jax import ragged_paged_attention

SEQUENCES = [(17, 17), (1, 64), (5, 40), (1, 1)]


@pytest.mark.parametrize("options", [{}, {"sm_scale": 0.125}, {"sliding_window": 9}, {"soft_cap": 4.0}], ids=str)
def test_results_equal_the_reference_of_the_tpu_kernel(platform, options):
    operands = list(batch(SEQUENCES, d=128, spare_rows=0, spare_slots=0, table_slack=0))
    # The reference multiplies masked values too, so that all numbers have to be finite and all pages valid.
    operands[1] = np.nan_to_num(operands[1])
    operands[3] = np.clip(operands[3], 0, len(operands[1]) - 1)
    options = {"sm_scale": 0.1, **options}
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(ref_ragged_paged_attention, *operands, **options))()
    np.testing.assert_allclose(ragged_paged_attention(*operands, **options), expected, atol=2e-5)


def test_every_argument_of_the_tpu_kernel_is_accepted():
    ours = inspect.signature(ragged_paged_attention).parameters
    theirs = inspect.signature(tpu.ragged_paged_attention).parameters
    assert set(theirs) <= set(ours)
    for name, parameter in theirs.items():
        positional = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        assert not positional or list(ours).index(name) == list(theirs).index(name)


def test_tuning_arguments_are_ignored(platform):
    operands = batch(SEQUENCES, d=128)
    tuned = ragged_paged_attention(
        *operands, num_kv_pages_per_block=4, num_queries_per_block=8, vmem_limit_bytes=1 << 20, mask_value=-1e9
    )
    np.testing.assert_array_equal(np.asarray(tuned), np.asarray(ragged_paged_attention(*operands)))


def test_sm_scale_may_be_traced(platform):
    operands = batch(SEQUENCES, d=128)
    scaled = jax.jit(lambda scale: ragged_paged_attention(*operands, sm_scale=scale, k_scale=0.5))(0.2)
    constant = ragged_paged_attention(*operands, sm_scale=0.2, k_scale=0.5)
    np.testing.assert_allclose(scaled, constant, atol=2e-5)
    assert np.abs(scaled - ragged_paged_attention(*operands, k_scale=0.5)).max() > 0.1
    with pytest.raises(ValueError, match=r"sm_scale has shape \[2\], expected one number"):
        ragged_paged_attention(*operands, sm_scale=jax.numpy.ones(2))
