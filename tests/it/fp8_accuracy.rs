//! How close prefill of fp8 queries, keys and values comes where it is hardest (`docs/kernels.md`, fp8): sums of one sign,
//! of which tensor cores cut off something at each step, one key that outweighs all others, large scores, many keys.
//!
//! Each case prints what part of its bound it takes: `--nocapture` shows it. The batches have no spare entries, so they
//! also pass with `XLA_ATTENTION_CHECK=1`.

use crate::support::answers::{Allowance, IfWrong, answers, assert_allowed, distance, lse_tolerance};
use crate::support::array::{BF16, F8E4M3FN, F16};
use crate::support::batch::{Dtypes, SequenceData, Shape};
use crate::support::case::Case;
use crate::support::guard::Side;
use crate::support::machine::runs_on_cpu;
use crate::support::oracle::Mask;
use crate::support::storage::{Layout, Storage};

/// What becomes of the numbers that are drawn.
#[derive(Clone, Copy, Debug)]
enum Numbers {
    AsDrawn,
    /// This is added to each of q and K.
    Shifted(f64),
    /// The key in the middle is this many times the first query, that before the last the opposite.
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

fn check_close(name: &str, shape: &Shape, numbers: Numbers, storage: &Storage) {
    let mut batch = shape.batch();
    batch.sequences.iter_mut().for_each(|sequence| numbers.apply(sequence, shape.head_dim));
    let case = Case { name: name.to_owned(), lse: true, ..Case::flash(&batch, storage) };
    let answers = answers(&case, IfWrong::Unspecified);
    let results = case.invocation().results(Side::EndsAtGuard);
    let (out, lse) = (results[0].values(), results[1].values());
    let (heads, dim, rows) = (case.form.q_heads, case.form.value_dim, case.rows());
    let most = Allowance::of(answers.iter().flatten().flatten()).most();
    let (mut out_share, mut lse_share, mut of_scores) = (0.0f64, 0.0f64, 0.0f64);
    for (at, allowed) in answers.iter().flatten().enumerate() {
        let Some(allowed) = allowed else { continue };
        let (row, head) = (at / heads, at % heads);
        out_share = out_share.max(distance(&out[at * dim..][..dim], &allowed.exact.out) / most);
        if allowed.exact.lse.is_finite() {
            let off = (lse[head * rows + row] - allowed.exact.lse).abs();
            let tolerance = lse_tolerance(allowed.exact.lse, case.form.dtypes, case.form.softcap > 0.0);
            lse_share = lse_share.max(off / (tolerance + allowed.score_error));
            of_scores = of_scores.max(off / allowed.score_error);
        }
    }
    println!("{name} {numbers:?}: of its bound out {out_share:.2}, lse {lse_share:.2}; of the scores' {of_scores:.3}");
    assert_allowed(&case, &answers, &results[0], Some(&results[1]));
}

const NUMBERS: [Numbers; 6] = [
    Numbers::AsDrawn,
    Numbers::Shifted(0.5),
    Numbers::Shifted(2.0),
    Numbers::OneKey(0.3),
    Numbers::OneKey(1.0),
    Numbers::OneKey(4.0),
];

fn fp8(head_dim: usize) -> Shape {
    let dtypes = Dtypes::narrow(BF16);
    Shape { dtypes, heads: (2, 1), head_dim, lengths: vec![(130, 700)], mask: Mask::FULL, ..Shape::default() }
}

#[test]
fn sums_of_one_sign_and_keys_that_outweigh_all_others() {
    for head_dim in [64, 128, 256] {
        for numbers in NUMBERS {
            check_close(&format!("D {head_dim}"), &fp8(head_dim), numbers, &Storage::contiguous().bare());
        }
    }
}

#[test]
fn options_of_the_score() {
    for head_dim in [128, 256] {
        let storage = Storage::paged(Layout::Stacked, 16).bare();
        for (name, shape) in [
            ("causal, sinks", Shape { mask: Mask::CAUSAL, sinks: true, ..fp8(head_dim) }),
            ("softcap 2.5", Shape { softcap: 2.5, ..fp8(head_dim) }),
            ("softcap 30", Shape { softcap: 30.0, sharpness: 8.0, ..fp8(head_dim) }),
            ("sharp 8", Shape { sharpness: 8.0, ..fp8(head_dim) }),
            ("sharp 30, f16", Shape { sharpness: 30.0, dtypes: Dtypes::narrow(F16), ..fp8(head_dim) }),
            ("flat", Shape { sharpness: 1.0 / 64.0, ..fp8(head_dim) }),
        ] {
            for numbers in [Numbers::AsDrawn, Numbers::Shifted(0.5)] {
                check_close(&format!("D {head_dim}, {name}"), &shape, numbers, &storage);
            }
        }
    }
}

#[test]
fn many_keys() {
    // The CPU decodes fp8: how many keys there are makes no difference of kind.
    let lengths: &[usize] = if runs_on_cpu() { &[4096] } else { &[4096, 16384, 131_072] };
    for head_dim in [128, 256] {
        for &keys in lengths {
            let shape = Shape { heads: (1, 1), lengths: vec![(64, keys)], ..fp8(head_dim) };
            for numbers in [Numbers::AsDrawn, Numbers::Shifted(0.5), Numbers::OneKey(0.5)] {
                check_close(&format!("D {head_dim}, {keys} keys"), &shape, numbers, &Storage::contiguous().bare());
            }
        }
    }
}
