//! The error of f32 attention in calls that the prefill kernels take. CUDA computes a product of f32 from products of
//! narrower parts (`docs/semantics.md#dtypes`); one without its smaller parts would stay within the error bounds of
//! [`assert_named_matches_reference`](crate::support::assert_named_matches_reference), whose floor is that of all dtypes.

use crate::support::{
    ALIBI, AttentionCase, BatchSpec, F32, InvalidMetadata, KvLayout, Mask, MemoryLayout, ReferenceCase as _,
    expected_rows,
};

/// The error of `out` relative to its size, both as norms over a call. f32 arithmetic has an error of about 2^-22; parts of 16
/// bits in all, as the two larger ones of three bf16, have one of about 2^-18.
const LARGEST_ERROR: f64 = 1.0 / (1 << 20) as f64;

fn check_error(name: &str, spec: &BatchSpec, memory_layout: &MemoryLayout) {
    let case = AttentionCase::flash(&spec.batch(), memory_layout);
    let out = case.assert_matches_reference()[0].values();
    let expected = expected_rows(&case, InvalidMetadata::Unspecified);
    let norms = |of: &dyn Fn(f64, f64, f64) -> f64| -> f64 {
        let rows = expected.iter().flatten().zip(out.chunks(case.config.value_dim));
        let rows = rows.filter_map(|(row, out)| Some((row.as_ref()?, out)));
        rows.flat_map(|(row, out)| row.exact.out.iter().zip(&row.naive.out).zip(out))
            .map(|((exact, naive), out)| of(*exact, *naive, *out).powi(2))
            .sum::<f64>()
            .sqrt()
    };
    let size = norms(&|exact, _, _| exact);
    let error = norms(&|exact, _, out| out - exact) / size;
    let naive = norms(&|exact, naive, _| naive - exact) / size;
    println!("{name}: {error:.2e}; naive {naive:.2e}");
    assert!(error <= LARGEST_ERROR, "{name}: the error is {error:.2e}, that of the naive formula {naive:.2e}");
}

fn f32(head_dim: usize) -> BatchSpec {
    BatchSpec {
        dtypes: F32.into(),
        heads: (2, 1),
        head_dim,
        lengths: vec![(130, 700), (300, 300)],
        mask: Mask::CAUSAL,
        ..BatchSpec::default()
    }
}

#[test]
fn products_have_the_accuracy_of_f32() {
    for head_dim in [40, 64, 128, 256] {
        for (layout, memory_layout) in
            [("packed", MemoryLayout::contiguous()), ("pages", MemoryLayout::paged(KvLayout::Interleaved, 12))]
        {
            check_error(&format!("D {head_dim}, {layout}"), &f32(head_dim), &memory_layout);
        }
    }
}

#[test]
fn score_options_keep_the_accuracy_of_f32() {
    for head_dim in [64, 128] {
        for (name, spec) in [
            ("full", BatchSpec { mask: Mask::FULL, ..f32(head_dim) }),
            ("soft cap", BatchSpec { softcap: 2.5, ..f32(head_dim) }),
            ("ALiBi", BatchSpec { alibi: ALIBI[1], ..f32(head_dim) }),
        ] {
            check_error(&format!("D {head_dim}, {name}"), &spec, &MemoryLayout::contiguous());
        }
    }
}
