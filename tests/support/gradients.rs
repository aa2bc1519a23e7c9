//! What the gradients of attention are (`src/problem/flash_attn_varlen_bwd.rs`), in f64 and without any thought of speed.
//!
//! [`differentiate`] is the definition, [`differentiate_naively`] the measure of what a kernel may be off by;
//! `gradient_case` applies both to whole calls.

use super::{BF16, Dtype, F16, Head, RowOf, Score, dot, dot_in_f32};
use half::{bf16, f16};
use std::ops::Range;

/// What came of a query head, and the cotangents of it.
pub struct ForwardResults<'a> {
    /// The output as its type holds it.
    pub out: RowOf<'a>,
    pub dout: RowOf<'a>,
    /// Of row i.
    pub dlse: Box<dyn Fn(usize) -> f64 + 'a>,
}

/// What one query head of one sequence adds to the gradients.
#[derive(Clone, Debug)]
pub struct HeadGradients {
    /// `[len_q, D]`
    pub dq: Vec<f64>,
    /// `[len_k, D]`
    pub dk: Vec<f64>,
    /// `[len_k, Dv]`
    pub dv: Vec<f64>,
    pub dsink: f64,
}

impl HeadGradients {
    fn zeros(head: &Head) -> Self {
        Self {
            dq: vec![0.0; head.len_q * head.dims[0]],
            dk: vec![0.0; head.len_k * head.dims[0]],
            dv: vec![0.0; head.len_k * head.dims[1]],
            dsink: 0.0,
        }
    }

    fn all(&self) -> impl Iterator<Item = &f64> {
        self.dq.iter().chain(&self.dk).chain(&self.dv).chain(std::iter::once(&self.dsink))
    }
}

/// What the linear bias adds to a score.
fn bias(head: &Head, score: &Score, i: usize, j: usize) -> Option<f64> {
    score.slope.map(|slope| -f64::from(slope) * head.distance(score.mask, i, j))
}

fn add(to: &mut [f64], factor: f64, x: &[f64]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}

/// The gradients, exactly.
pub fn differentiate(head: &Head, of: &ForwardResults, score: &Score) -> HeadGradients {
    let [d, dv] = head.dims;
    let (scale, cap) = (score.scales.map(f64::from).iter().product::<f64>(), f64::from(score.softcap));
    let sink = score.sink.map_or(f64::NEG_INFINITY, f64::from);
    let mut gradients = HeadGradients::zeros(head);
    for i in 0..head.len_q {
        let visible = head.visible(score.mask, i);
        // (score, what the cap does to its gradient)
        let scores: Vec<(f64, f64)> = visible
            .clone()
            .map(|j| {
                let s = scale * dot((head.query)(i), (head.key)(j));
                let t = (s / cap).tanh();
                let (s, slope) = if cap > 0.0 { (cap * t, 1.0 - t * t) } else { (s, 1.0) };
                (s + bias(head, score, i, j).unwrap_or(0.0), slope)
            })
            .collect();
        let largest = scores.iter().map(|s| s.0).fold(sink, f64::max);
        if largest == f64::NEG_INFINITY {
            continue;
        }
        let of_sink = (sink - largest).exp();
        let sum = scores.iter().map(|s| (s.0 - largest).exp()).sum::<f64>() + of_sink;
        let p: Vec<f64> = scores.iter().map(|s| (s.0 - largest).exp() / sum).collect();
        let dp: Vec<f64> = visible.clone().map(|j| dot((of.dout)(i), (head.value)(j))).collect();
        let delta = dot(&p, &dp) - (of.dlse)(i);
        gradients.dsink -= of_sink / sum * delta;
        for (index, j) in visible.enumerate() {
            let ds = scale * p[index] * (dp[index] - delta) * scores[index].1;
            add(&mut gradients.dq[i * d..][..d], ds, (head.key)(j));
            add(&mut gradients.dk[j * d..][..d], ds, (head.query)(i));
            add(&mut gradients.dv[j * dv..][..dv], p[index], (of.dout)(i));
        }
    }
    gradients
}

/// The same formula as somebody would write it with arrays of `dtype`: products accumulated in f32, every intermediate
/// array rounded to `dtype`, the softmax in f32, delta from the output as it is stored. Where its numbers overflow it
/// measures nothing, and the intermediate arrays are taken in f32.
pub fn differentiate_naively(head: &Head, of: &ForwardResults, score: &Score, dtype: Dtype) -> HeadGradients {
    let round = |x: f32| match dtype {
        F16 => f16::from_f32(x).to_f32(),
        BF16 => bf16::from_f32(x).to_f32(),
        _ => x,
    };
    let naive = differentiate_rounding(head, of, score, round);
    if naive.all().all(|x| x.is_finite()) {
        return naive;
    }
    let mut wide = differentiate_rounding(head, of, score, |x| x);
    let HeadGradients { dq, dk, dv, .. } = &mut wide;
    [dq, dk, dv].into_iter().flatten().for_each(|x| *x = f64::from(round(*x as f32)));
    wide
}

/// [`differentiate_naively`] with what becomes of an intermediate number.
fn differentiate_rounding(
    head: &Head,
    of: &ForwardResults,
    score: &Score,
    round: impl Fn(f32) -> f32,
) -> HeadGradients {
    let [d, dv] = head.dims;
    let (scale, cap) = (score.scales.iter().product::<f32>(), score.softcap);
    let sink = score.sink.unwrap_or(f32::NEG_INFINITY);
    // Sums are f32 that stand in f64.
    let add = |to: &mut [f64], factor: f32, x: &[f64]| {
        to.iter_mut().zip(x).for_each(|(to, x)| *to = f64::from(*to as f32 + factor * *x as f32));
    };
    let mut gradients = HeadGradients::zeros(head);
    for i in 0..head.len_q {
        let visible = head.visible(score.mask, i);
        let scores: Vec<(f32, f32)> = visible
            .clone()
            .map(|j| {
                let s = round(scale * round(dot_in_f32((head.query)(i), (head.key)(j))));
                let t = round((s / cap).tanh());
                let (s, slope) = if cap > 0.0 { (round(cap * t), round(1.0 - t * t)) } else { (s, 1.0) };
                (bias(head, score, i, j).map_or(s, |bias| round(s + round(bias as f32))), slope)
            })
            .collect();
        let largest = scores.iter().map(|s| s.0).fold(sink, f32::max);
        if largest == f32::NEG_INFINITY {
            continue;
        }
        let of_sink = (sink - largest).exp();
        let sum = scores.iter().map(|s| (s.0 - largest).exp()).sum::<f32>() + of_sink;
        // The weights come from the lse as f32 holds it, which is all that a forward pass leaves.
        let lse = largest + sum.ln();
        let delta = dot_in_f32((of.out)(i), (of.dout)(i)) - (of.dlse)(i) as f32;
        gradients.dsink = f64::from(gradients.dsink as f32 - round(round((sink - lse).exp()) * delta));
        for (s, j) in scores.into_iter().zip(visible) {
            let p = round((s.0 - lse).exp());
            let dp = round(dot_in_f32((of.dout)(i), (head.value)(j)));
            let ds = round(round(p * (dp - delta)) * s.1);
            add(&mut gradients.dq[i * d..][..d], ds, (head.key)(j));
            add(&mut gradients.dk[j * d..][..d], ds, (head.query)(i));
            add(&mut gradients.dv[j * dv..][..dv], p, (of.dout)(i));
        }
    }
    let scaled = |x: &mut f64| *x = f64::from(round(scale * round(*x as f32)));
    gradients.dq.iter_mut().chain(&mut gradients.dk).for_each(scaled);
    gradients.dv.iter_mut().for_each(|x| *x = f64::from(round(*x as f32)));
    gradients
}
