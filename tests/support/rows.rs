//! Results cut into sequences, for laws that hold between two calls.

use super::answers::distance;
use super::array::{Array, Dtype};
use super::batch::{Batch, SequenceData};
use super::case::{Case, Target};
use super::guard::Side;
use super::storage::Storage;

/// The rows of one sequence.
#[derive(Clone, PartialEq, Debug)]
pub struct Rows {
    /// `[len_q, Hq, Dv]`
    pub out: Vec<f64>,
    pub bits: Vec<u8>,
    /// `[Hq][len_q]`
    pub lse: Vec<Vec<f64>>,
}

/// Run `batch` and cut the results into sequences.
pub fn attend(target: Target, batch: &Batch, storage: &Storage) -> Vec<Rows> {
    let case = Case::store(target, batch, storage);
    let results = case.invocation().results(Side::EndsAtGuard);
    rows_of(&case, batch, &results)
}

/// The sequences' rows of `[out, softmax_lse]`.
pub fn rows_of(case: &Case, batch: &Batch, results: &[Array]) -> Vec<Rows> {
    let (out, lse) = (results[0].values(), results[1].values());
    let (row_len, size) = (case.form.q_heads * case.form.value_dim, results[0].dtype.size());
    let of = |(index, sequence): (usize, &SequenceData)| {
        let first = case.cu_seqlens_q[index] as usize;
        let elements = first * row_len..(first + sequence.len_q) * row_len;
        Rows {
            out: out[elements.clone()].to_vec(),
            bits: results[0].bytes[elements.start * size..elements.end * size].to_vec(),
            lse: (0..case.form.q_heads).map(|h| lse[h * case.rows() + first..][..sequence.len_q].to_vec()).collect(),
        }
    };
    batch.sequences.iter().enumerate().map(of).collect()
}

impl Rows {
    /// Row `i` of a head.
    pub fn row(&self, heads: usize, i: usize, head: usize) -> &[f64] {
        let d = self.out.len() / (heads * self.lse[0].len());
        &self.out[(i * heads + head) * d..][..d]
    }
}

/// Equal but for twice what SPEC 2.1 allows one f32 answer to be off by: outputs a little over 1e-5, lse 1e-4.
pub fn assert_close(a: &[f64], b: &[f64], each_off_by: f64, what: &str) {
    let size = a.iter().chain(b).copied().filter(|x| x.is_finite()).fold(1.0f64, |m, x| m.max(x.abs()));
    // Equal infinities are equal.
    let pairs: (Vec<f64>, Vec<f64>) = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).unzip();
    let off = distance(&pairs.0, &pairs.1);
    assert!(a.len() == b.len() && off <= 2.0 * each_off_by * size, "{what}: off by {off:e}");
}

pub const OUT: f64 = 1.5e-5;
pub const LSE: f64 = 1e-4;

/// The rows of two calls agree within what their arithmetic allows. Laws are held in f32, where the order of sums is
/// all that may differ between their two sides.
pub fn assert_same_rows(a: &[Rows], b: &[Rows], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(b) {
        assert_close(&a.out, &b.out, OUT, &format!("{what}: out"));
        assert_close(&a.lse.concat(), &b.lse.concat(), LSE, &format!("{what}: lse"));
    }
}

/// Apply `change(head, [D] row)` to every row of `[n, heads, D]`.
pub fn change_rows(rows: &mut [f64], heads: usize, d: usize, change: impl Fn(usize, &mut [f64])) {
    for (index, row) in rows.chunks_exact_mut(d).enumerate() {
        change(index % heads, row);
    }
}

/// `values` as `dtype` holds them.
pub fn rounded(dtype: Dtype, values: &[f64]) -> Vec<f64> {
    values.iter().map(|&x| dtype.round(x)).collect()
}
