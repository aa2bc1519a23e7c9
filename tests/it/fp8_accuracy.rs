//! The error of prefill with fp8 queries, keys and values in the cases with the largest errors
//! (`docs/dev/kernels/hopper_prefill_fp8.md`): sums of one sign, which tensor cores truncate at each step; one dominant
//! key; large scores; many keys.
//!
//! The summary (`tests/support/summary.rs`) has the ratio of each error to its bound. The batches have no spare
//! entries, so that they also pass with `XLA_ATTENTION_CHECK=1`.

use crate::support::{
    AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F16, KvLayout, Mask, MemoryLayout, Numbers as _, SequenceData,
    assert_named_matches_reference, runs_on_cpu,
};

/// A change of the random numbers.
#[derive(Clone, Copy, Debug)]
enum Numbers {
    AsDrawn,
    /// Adds this number to each element of q and k.
    Shifted(f64),
    /// Makes the key in the middle a multiple of the first query, and the last but one the opposite.
    OneKey(f64),
}

impl Numbers {
    fn apply(self, sequence: &mut SequenceData, head_dim: usize) {
        let round = |x: f64| F8E4M3FN.round(x.clamp(-448.0, 448.0));
        match self {
            Self::AsDrawn => {}
            Self::Shifted(by) => sequence.q.iter_mut().chain(&mut sequence.k).for_each(|x| *x = round(*x + by)),
            Self::OneKey(times) => {
                let query = sequence.q[..head_dim].to_vec();
                let row = sequence.k.len() / sequence.len_k;
                for (key, times) in [(sequence.len_k / 2, times), (sequence.len_k - 2, -times)] {
                    for (x, q) in sequence.k[key * row..][..head_dim].iter_mut().zip(&query) {
                        *x = round(times * q);
                    }
                }
            }
        }
    }
}

fn check_close(name: &str, spec: &BatchSpec, numbers: Numbers, memory_layout: &MemoryLayout) {
    let mut batch = spec.batch();
    batch.sequences.iter_mut().for_each(|sequence| numbers.apply(sequence, spec.head_dim));
    assert_named_matches_reference(&format!("{name} {numbers:?}"), &mut AttentionCase::flash(&batch, memory_layout));
}

const NUMBERS: [Numbers; 6] = [
    Numbers::AsDrawn,
    Numbers::Shifted(0.5),
    Numbers::Shifted(2.0),
    Numbers::OneKey(0.3),
    Numbers::OneKey(1.0),
    Numbers::OneKey(4.0),
];

fn fp8(head_dim: usize) -> BatchSpec {
    let dtypes = Dtypes::narrow(BF16);
    BatchSpec { dtypes, heads: (2, 1), head_dim, lengths: vec![(130, 700)], mask: Mask::FULL, ..BatchSpec::default() }
}

#[test]
fn sums_of_one_sign_and_one_dominant_key_stay_within_the_bound() {
    for head_dim in [64, 128, 256] {
        for numbers in NUMBERS {
            check_close(&format!("D {head_dim}"), &fp8(head_dim), numbers, &MemoryLayout::contiguous().bare());
        }
    }
}

#[test]
fn score_options_stay_within_the_bound() {
    for head_dim in [64, 128, 256] {
        let memory_layout = MemoryLayout::paged(KvLayout::Stacked, 16).bare();
        for (name, spec) in [
            ("causal, sinks", BatchSpec { mask: Mask::CAUSAL, sinks: true, ..fp8(head_dim) }),
            ("softcap 2.5", BatchSpec { softcap: 2.5, ..fp8(head_dim) }),
            ("softcap 30", BatchSpec { softcap: 30.0, sharpness: 8.0, ..fp8(head_dim) }),
            ("sharp 8", BatchSpec { sharpness: 8.0, ..fp8(head_dim) }),
            ("sharp 30, f16", BatchSpec { sharpness: 30.0, dtypes: Dtypes::narrow(F16), ..fp8(head_dim) }),
            ("flat", BatchSpec { sharpness: 1.0 / 64.0, ..fp8(head_dim) }),
        ] {
            for numbers in [Numbers::AsDrawn, Numbers::Shifted(0.5)] {
                check_close(&format!("D {head_dim}, {name}"), &spec, numbers, &memory_layout);
            }
        }
    }
}

#[test]
fn many_keys_stay_within_the_bound() {
    // The CPU kernels decode fp8, so that the number of keys does not affect the error.
    let lengths: &[usize] = if runs_on_cpu() { &[4096] } else { &[4096, 16384, 131_072] };
    for head_dim in [128, 256] {
        for &keys in lengths {
            let spec = BatchSpec { heads: (1, 1), lengths: vec![(64, keys)], ..fp8(head_dim) };
            for numbers in [Numbers::AsDrawn, Numbers::Shifted(0.5), Numbers::OneKey(0.5)] {
                check_close(&format!("D {head_dim}, {keys} keys"), &spec, numbers, &MemoryLayout::contiguous().bare());
            }
        }
    }
}
