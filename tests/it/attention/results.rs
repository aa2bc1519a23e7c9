//! Results per sequence, for tests that compare two calls.

use super::Operator;
use crate::support::{
    Array, AttentionCase, Batch, GradientCase, GradientOptions, MemoryLayout, SequenceData, Side, distance,
};

/// The results of one sequence.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Rows {
    /// `[len_q, Hq, Dv]`.
    pub(crate) out: Vec<f64>,
    pub(crate) bits: Vec<u8>,
    /// `[Hq][len_q]`.
    pub(crate) lse: Vec<Vec<f64>>,
}

/// Runs the call and splits its results by sequence.
pub(crate) fn attend(op: Operator, batch: &Batch, memory_layout: &MemoryLayout) -> Vec<Rows> {
    let case = AttentionCase::store(op.target(), batch, memory_layout);
    let results = case.invocation().results(Side::EndsAtGuard);
    let (out, lse) = (results[0].values(), results[1].values());
    let (row_len, size) = (case.config.q_heads * case.config.value_dim, results[0].dtype.size());
    let of = |(index, sequence): (usize, &SequenceData)| {
        let first = case.cu_seqlens_q[index] as usize;
        let elements = first * row_len..(first + sequence.len_q) * row_len;
        Rows {
            out: out[elements.clone()].to_vec(),
            bits: results[0].bytes[elements.start * size..elements.end * size].to_vec(),
            lse: (0..case.config.q_heads).map(|h| lse[h * case.rows() + first..][..sequence.len_q].to_vec()).collect(),
        }
    };
    batch.sequences.iter().enumerate().map(of).collect()
}

/// Asserts that all layouts give the same bits, and each sequence alone those that it has in the batch.
pub(crate) fn assert_same_bits_alone(op: Operator, batch: &Batch, layouts: &[MemoryLayout], name: &str) {
    let whole = attend(op, batch, &layouts[0]);
    for layout in &layouts[1..] {
        assert!(attend(op, batch, layout) == whole, "{name}: {layout:?} changed the bits");
    }
    for (index, rows) in whole.iter().enumerate() {
        let layout = &layouts[index % layouts.len()];
        let alone = attend(op, &batch.only(index), layout);
        assert!(alone[0] == *rows, "{name}: sequence {index} alone, {layout:?}");
    }
}

/// The gradients of one sequence.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Gradients {
    /// `[len_q, Hq, D]`.
    pub(crate) dq: Vec<f64>,
    /// `[len_k, Hkv, D]`.
    pub(crate) dk: Vec<f64>,
    /// `[len_k, Hkv, Dv]`.
    pub(crate) dv: Vec<f64>,
    /// The cotangents of its results, `[len_q, Hq, Dv]` and `[len_q, Hq]`.
    pub(crate) dout: Vec<f64>,
    pub(crate) dlse: Vec<f64>,
}

/// The gradients of each sequence, and `dsinks`.
pub(crate) fn differentiate(batch: &Batch, memory_layout: &MemoryLayout) -> (Vec<Gradients>, Vec<f64>) {
    gradients_of(&GradientCase::store(batch, memory_layout, GradientOptions::ALL), batch)
}

pub(crate) fn gradients_of(case: &GradientCase, batch: &Batch) -> (Vec<Gradients>, Vec<f64>) {
    let results: Vec<Vec<f64>> = case.invocation().results(Side::EndsAtGuard).iter().map(Array::values).collect();
    let config = &batch.config;
    let (dout, dlse) = (case.dout.values(), case.dlse.as_ref().unwrap().values());
    let forward: &AttentionCase = &case.forward;
    let of = |(index, sequence): (usize, &SequenceData)| {
        let (row, key) = (forward.cu_seqlens_q[index] as usize, forward.cu_seqlens_k[index] as usize);
        let cut = |all: &[f64], first: usize, len: usize, width: usize| all[first * width..][..len * width].to_vec();
        let (heads, kv_heads) = (config.q_heads, config.kv_heads);
        let rows = (row..row + sequence.len_q).flat_map(|i| (0..heads).map(move |h| h * forward.rows() + i));
        Gradients {
            dq: cut(&results[0], row, sequence.len_q, heads * config.head_dim),
            dk: cut(&results[1], key, sequence.len_k, kv_heads * config.head_dim),
            dv: cut(&results[2], key, sequence.len_k, kv_heads * config.value_dim),
            dout: cut(&dout, row, sequence.len_q, heads * config.value_dim),
            dlse: rows.map(|at| dlse[at]).collect(),
        }
    };
    (batch.sequences.iter().enumerate().map(of).collect(), results[3].clone())
}

/// Asserts that two results differ by at most twice the error bound of one of them (`docs/semantics.md#error-bounds`).
pub(crate) fn assert_close(a: &[f64], b: &[f64], each_off_by: f64, description: &str) {
    let size = a.iter().chain(b).copied().filter(|x| x.is_finite()).fold(1.0f64, |m, x| m.max(x.abs()));
    // Equal infinities have no difference.
    let pairs: (Vec<f64>, Vec<f64>) = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).unzip();
    let off = distance(&pairs.0, &pairs.1);
    assert!(a.len() == b.len() && off <= 2.0 * each_off_by * size, "{description}: off by {off:e}");
}

/// Error bounds in f32 of an output, an lse and a gradient.
pub(crate) const OUT: f64 = 1.5e-5;
pub(crate) const LSE: f64 = 1e-4;
pub(crate) const GRADIENT: f64 = 1.5e-4;

/// Asserts that the results of two calls agree within their error bounds. Both calls are in f32, where only the order
/// of sums may differ.
pub(crate) fn assert_same_rows(a: &[Rows], b: &[Rows], description: &str) {
    assert_eq!(a.len(), b.len(), "{description}");
    for (a, b) in a.iter().zip(b) {
        assert_close(&a.out, &b.out, OUT, &format!("{description}: out"));
        assert_close(&a.lse.concat(), &b.lse.concat(), LSE, &format!("{description}: lse"));
    }
}

/// The same for gradients.
pub(crate) fn assert_same_gradients(
    (a, a_sinks): &(Vec<Gradients>, Vec<f64>),
    (b, b_sinks): &(Vec<Gradients>, Vec<f64>),
    description: &str,
) {
    assert_eq!(a.len(), b.len(), "{description}");
    for (a, b) in a.iter().zip(b) {
        for (a, b, name) in [(&a.dq, &b.dq, "dq"), (&a.dk, &b.dk, "dk"), (&a.dv, &b.dv, "dv")] {
            assert_close(a, b, GRADIENT, &format!("{description}: {name}"));
        }
    }
    assert_close(a_sinks, b_sinks, GRADIENT, &format!("{description}: dsinks"));
}
