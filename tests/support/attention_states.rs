//! Attention states (an output and its log-sum-exp over a set of keys), and the reference for merging two of them
//! (`docs/semantics.md#merge_attention_states`).

use super::{Array, BF16, Dtype, F16, F32, Invocation, Random};

/// `out [n, h, d]` and `lse [h, n]` over one set of keys.
#[derive(Clone, Debug)]
pub struct State {
    pub out: Array,
    pub lse: Array,
}

/// Scales of the log-sum-exps of a random state; those that are not finite are used as they are.
pub const ANY_LSE: [f64; 8] = [0.0, 1.0, 5.0, 60.0, 1000.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

impl State {
    /// Random numbers. Each lse is a normal number times one of `lse_scales`, or the scale itself if that is not
    /// finite. The output of a row whose lse is not finite is garbage.
    pub fn random(dtype: Dtype, (n, h, d): (usize, usize, usize), lse_scales: &[f64], seed: u64) -> Self {
        let mut random = Random::new(seed);
        let lse: Vec<f64> = (0..h * n)
            .map(|_| match random.one_of(lse_scales) {
                scale if scale.is_finite() => scale * random.normal(),
                other => other,
            })
            .collect();
        // out [n, h, d], lse [h, n]
        let out: Vec<f64> = (0..n * h * d)
            .map(|i| {
                let has_keys = lse[i / d % h * n + i / d / h].is_finite();
                if has_keys {
                    random.normal()
                } else {
                    random.one_of(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e4])
                }
            })
            .collect();
        Self::new(dtype, (n, h, d), &out, &lse)
    }

    pub fn new(dtype: Dtype, (n, h, d): (usize, usize, usize), out: &[f64], lse: &[f64]) -> Self {
        let [n, h, d] = [n, h, d].map(|size| size as i64);
        Self { out: Array::new(dtype, &[n, h, d], out), lse: Array::new(F32, &[h, n], lse) }
    }

    pub fn merge(&self, other: &Self) -> Invocation {
        Invocation::new("xla_gpu_merge_attention_states")
            .operand("out_a", self.out.clone())
            .operand("lse_a", self.lse.clone())
            .operand("out_b", other.out.clone())
            .operand("lse_b", other.lse.clone())
            .result("out", self.out.dtype, &self.out.dims)
            .result("lse", F32, &self.lse.dims)
    }

    /// The results of [`State::merge`].
    pub fn of(results: &[Array]) -> Self {
        Self { out: results[0].clone(), lse: results[1].clone() }
    }

    fn sizes(&self) -> (usize, usize, usize) {
        (self.out.dims[0] as usize, self.out.dims[1] as usize, self.out.dims[2] as usize)
    }

    /// Asserts that this state is `a` merged with `b`: bit by bit where only one of them has a finite lse, otherwise
    /// within rounding.
    #[allow(clippy::float_cmp, reason = "exactly the part that is there is meant")]
    pub fn assert_merged_from(&self, a: &Self, b: &Self) {
        assert_eq!((self.sizes(), self.out.dtype), (a.sizes(), a.out.dtype));
        let (n, h, d) = self.sizes();
        let lse = [a, b, self].map(|state| state.lse.values());
        let out = [a, b, self].map(|state| state.out.values());
        for (row, head) in (0..n).flat_map(|row| (0..h).map(move |head| (row, head))) {
            let [lse_a, lse_b, actual] = [0, 1, 2].map(|i| lse[i][head * n + row]);
            let elements = (row * h + head) * d..(row * h + head + 1) * d;
            let [out_a, out_b, merged] = [0, 1, 2].map(|i| &out[i][elements.clone()]);
            let at = format!("row {row}, head {head} of {:?}, lse {lse_a} and {lse_b}", self.out.dims);
            if lse_a.is_finite() && lse_b.is_finite() {
                assert_weighted(self.out.dtype, (lse_a, out_a), (lse_b, out_b), (actual, merged), &at);
            } else if lse_a.is_finite() || lse_b.is_finite() {
                let (nonempty, lse) = if lse_a.is_finite() { (a, lse_a) } else { (b, lse_b) };
                let size = self.out.dtype.size();
                let bytes = elements.start * size..elements.end * size;
                assert!(self.out.bytes[bytes.clone()] == nonempty.out.bytes[bytes], "{at}: not the nonempty state");
                assert!(actual == lse, "{at}: lse is {actual}");
            } else {
                assert!(merged.iter().all(|x| *x == 0.0), "{at}: out is not 0 but {merged:?}");
                assert!(actual == f64::NEG_INFINITY, "{at}: lse is {actual}");
            }
        }
    }
}

fn assert_weighted(dtype: Dtype, a: (f64, &[f64]), b: (f64, &[f64]), actual: (f64, &[f64]), at: &str) {
    let largest = a.0.max(b.0);
    let (share_a, share_b) = ((a.0 - largest).exp(), (b.0 - largest).exp());
    let sum = share_a + share_b;
    let lse = largest + sum.ln();
    assert!((actual.0 - lse).abs() <= 1e-6 * lse.abs().max(1.0), "{at}: lse is {}, expected {lse}", actual.0);
    // The largest relative error of rounding to nearest, and the distance of the smallest numbers of the type.
    let (relative, smallest) = match dtype {
        F16 => (2f64.powi(-11), 2f64.powi(-24)),
        BF16 => (2f64.powi(-8), 2f64.powi(-133)),
        _ => (2f64.powi(-23), 2f64.powi(-148)),
    };
    let (a_lse, b_lse) = (a.0, b.0);
    for ((a, b), actual) in a.1.iter().zip(b.1).zip(actual.1) {
        let (part_a, part_b) = (share_a / sum * a, share_b / sum * b);
        let exact = part_a + part_b;
        // The difference of the log-sum-exps is rounded to f32 twice before the exponential: once as such, once times
        // log2(e).
        let weight_error = 1e-6 + (a_lse - b_lse).abs() * 2f64.powi(-23);
        let allowed = relative * exact.abs() + weight_error * (part_a.abs() + part_b.abs()) + smallest;
        assert!((actual - exact).abs() <= allowed, "{at}: {actual:e} instead of {exact:e}");
    }
}
