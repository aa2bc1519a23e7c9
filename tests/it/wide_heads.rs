//! Head dimensions past 256, of which several warps have the same rows on a GPU: all pairs of options and every dimension, also
//! of gradients, batch invariance and hostile metadata, against the reference on every device; and that the kernels were launched.

use crate::attention::Operator;
use crate::attention::metadata::corrupt;
use crate::attention::results::attend;
use crate::support::{
    ATTENTION_DTYPES, AttentionCase, BF16, Batch, BatchSpec, Dtypes, F32, GradientCase, GradientOptions,
    InvalidMetadata, KvLayout, Mask, MemoryLayout, PairwiseOptions, ReferenceCase, assert_calls_match_reference,
    has_gradients, skips_slow_test,
};
use xla_attention::Op;

/// All columns of the bucket, and fewer: whole columns of a warp, parts of them, and warps without any.
const HEAD_DIMS: [(usize, usize); 8] =
    [(512, 512), (320, 320), (384, 384), (264, 264), (504, 504), (512, 128), (192, 384), (8, 440)];

const CALLS: PairwiseOptions = PairwiseOptions {
    head_dims: &HEAD_DIMS,
    heads: &[(1, 1), (4, 2), (5, 1), (16, 1)],
    seed: 43,
    ..PairwiseOptions::ATTENTION
};

#[test]
fn every_pair_agrees_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    assert_calls_match_reference("wide", CALLS.calls(), |(target, spec, memory_layout, _)| {
        AttentionCase::store(target, &spec.batch(), &memory_layout)
    });
}

const GRADIENTS: PairwiseOptions =
    PairwiseOptions { head_dims: CALLS.head_dims, heads: CALLS.heads, seed: 44, ..PairwiseOptions::GRADIENTS };

#[test]
fn every_pair_of_options_of_gradients_agrees_with_the_reference() {
    let calls = GRADIENTS.calls().into_iter().filter(|(_, spec, ..)| has_gradients(spec.dtypes.q, 512));
    assert_calls_match_reference("wide gradients", calls, |(_, spec, memory_layout, options)| {
        GradientCase::store(&spec.batch(), &memory_layout, options)
    });
}

#[test]
fn gradients_of_every_dimension_agree_with_the_reference() {
    for (index, head_dim) in (264..=512).step_by(8).enumerate() {
        let value_dim = Some([head_dim, 520 - head_dim, 512][index % 3]);
        let dtype = ATTENTION_DTYPES[index / 3 % 3];
        if !has_gradients(dtype, 512) {
            continue;
        }
        let lengths = vec![(1, 37), (18, 25), (40, 70), (33, 9)];
        let spec =
            BatchSpec { dtypes: dtype.into(), head_dim, value_dim, heads: (2, 1), lengths, ..BatchSpec::default() };
        let case = GradientCase::store(&spec.batch(), &MemoryLayout::contiguous(), GradientOptions::ALL);
        ReferenceCase::assert_matches_reference(&case);
    }
}

#[test]
fn every_dimension_agrees_with_the_reference() {
    for (index, head_dim) in (264..=512).step_by(8).enumerate() {
        let dtypes = Dtypes::ALL[index % Dtypes::ALL.len()];
        let layouts = [KvLayout::Contiguous, KvLayout::Split, KvLayout::Interleaved, KvLayout::PerPage];
        let layout = layouts[index % layouts.len()];
        let value_dim = layout.has_two_buffers().then_some([head_dim, 520 - head_dim][index / 4 % 2]);
        let lengths = vec![(1, 37), (18, 25), (1, 3), (40, 70), (1, 200)];
        let spec = BatchSpec { dtypes, head_dim, value_dim, heads: (2, 1), lengths, ..BatchSpec::default() };
        let memory_layout = match layout {
            KvLayout::Contiguous => MemoryLayout::contiguous(),
            _ => MemoryLayout::paged(layout, [7, 16, 64][index % 3]),
        };
        AttentionCase::store(Op::FlashAttnVarlen, &spec.batch(), &memory_layout).assert_matches_reference();
    }
}

/// Decode over contexts of these lengths, and a chunk of prefill.
fn mixed(dtypes: Dtypes, lengths: &[usize]) -> BatchSpec {
    let decodes = lengths.iter().map(|&length| (1, length));
    let (head_dim, lengths) = (512, decodes.chain([(45, 120)]).collect());
    BatchSpec { dtypes, head_dim, heads: (8, 2), lengths, mask: Mask::CAUSAL, ..BatchSpec::default() }
}

#[test]
fn batch_invariant_rows_do_not_depend_on_the_batch() {
    for dtypes in [F32.into(), BF16.into(), Dtypes::ALL[4]] {
        let spec = BatchSpec { batch_invariant: true, ..mixed(dtypes, &[1300, 3, 700, 64]) };
        let batch = spec.batch();
        let expected = attend(Operator::PagedAttention, &batch, &MemoryLayout::default());
        let order = [4, 3, 2, 1, 0, 3, 3, 4, 2];
        let sequences = order.map(|index| batch.sequences[index].clone()).to_vec();
        let crowd = MemoryLayout { rows_around: (5, 9), workspace: Some(900_000), ..MemoryLayout::default() };
        let actual = attend(Operator::PagedAttention, &Batch { sequences, ..batch }, &crowd);
        for (place, (rows, original)) in actual.iter().zip(order).enumerate() {
            assert!(*rows == expected[original], "{dtypes:?}: sequence {original} at place {place}");
        }
    }
}

#[test]
fn hostile_metadata_does_not_affect_valid_sequences() {
    for seed in 0..24 {
        let dtypes = Dtypes::ALL[seed as usize % Dtypes::ALL.len()];
        let spec = BatchSpec { seed, ..mixed(dtypes, &[300, 40, 900, 16, 129]) };
        let mut case = AttentionCase::paged(&spec.batch(), &MemoryLayout::default());
        corrupt(&mut case, seed);
        case.compare_with_reference(InvalidMetadata::Unspecified);
    }
}

#[cfg(feature = "cuda")]
mod on_their_own_gpu {
    use super::{
        ATTENTION_DTYPES, AttentionCase, BF16, BatchSpec, Dtypes, GradientCase, GradientOptions, MemoryLayout,
        has_gradients, mixed,
    };
    use crate::support::F16;
    use crate::support::device::Gpu;

    #[test]
    fn kernels_of_512_columns_are_chosen() {
        let Some(gpu) = Gpu::or_skip() else { return };
        for dtypes in Dtypes::ALL {
            // Soft caps have no kernel of Hopper's.
            for (head_dim, softcap) in [(320, 0.0), (512, 0.0), (512, 2.5)] {
                let spec = BatchSpec { head_dim, softcap, ..mixed(dtypes, &[700, 40, 130]) };
                let has_tuned =
                    Gpu::runs_sm_90a() && softcap == 0.0 && dtypes.q == dtypes.kv && [BF16, F16].contains(&dtypes.q);
                let storage = if head_dim == 512 { "paged" } else { "contiguous" };
                let long = if has_tuned { format!("_512_{storage}_none") } else { "_512_prefill_".into() };
                AttentionCase::paged(&spec.batch(), &MemoryLayout::default())
                    .invocation()
                    .assert_logs(&gpu, &["_512_decode_", &long]);
            }
        }
    }

    #[test]
    fn gradients_of_512_columns_are_chosen() {
        let Some(gpu) = Gpu::or_skip() else { return };
        for dtype in ATTENTION_DTYPES.into_iter().filter(|dtype| has_gradients(*dtype, 512)) {
            let spec = BatchSpec { head_dim: 320, dtypes: dtype.into(), ..BatchSpec::default() };
            GradientCase::store(&spec.batch(), &MemoryLayout::contiguous(), GradientOptions::ALL)
                .invocation()
                .assert_logs(
                    &gpu,
                    &[&format!("attention_bwd_dq_{dtype}_512_"), &format!("attention_bwd_dkdv_{dtype}_512_")],
                );
        }
    }
}
