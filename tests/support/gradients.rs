//! The reference for the gradients of attention (`src/problem/flash_attn_varlen_bwd.rs`), in f64.
//!
//! [`differentiate`] is the definition. The error of [`differentiate_naively`] is the unit of the allowed error.
//! `gradient_case` applies both to whole calls.

use super::{BF16, Dtype, F16, Head, RowOf, Score, dot, dot_in_f32};
use half::{bf16, f16};
use std::ops::Range;

/// The results of the forward pass of one query head, and their cotangents.
pub struct ForwardResults<'a> {
    /// The output, rounded to its dtype.
    pub out: RowOf<'a>,
    pub dout: RowOf<'a>,
    /// Cotangent of the log-sum-exp of row i.
    pub dlse: Box<dyn Fn(usize) -> f64 + 'a>,
}

/// The contribution of one query head of one sequence to the gradients.
#[derive(Clone, Debug)]
pub struct HeadGradients {
    /// `[len_q, D]`.
    pub dq: Vec<f64>,
    /// `[len_k, D]`.
    pub dk: Vec<f64>,
    /// `[len_k, Dv]`.
    pub dv: Vec<f64>,
    pub dsink: f64,
    /// `[len_q, len_k]`, with a bias.
    pub dbias: Vec<f64>,
}

impl HeadGradients {
    fn zeros(head: &Head) -> Self {
        Self {
            dq: vec![0.0; head.len_q * head.dims[0]],
            dk: vec![0.0; head.len_k * head.dims[0]],
            dv: vec![0.0; head.len_k * head.dims[1]],
            dsink: 0.0,
            dbias: if head.bias.is_some() { vec![0.0; head.len_q * head.len_k] } else { Vec::new() },
        }
    }

    fn all(&self) -> impl Iterator<Item = &f64> {
        self.dq.iter().chain(&self.dk).chain(&self.dv).chain(std::iter::once(&self.dsink)).chain(&self.dbias)
    }
}

/// What is added to a score: by ALiBi, and by the bias of the row and the key.
fn biases(head: &Head, score: &Score, i: usize, j: usize) -> impl Iterator<Item = f64> {
    let slope = score.slope.map(|slope| -f64::from(slope) * head.distance(score.mask, i, j));
    slope.into_iter().chain(head.bias.as_ref().map(|bias| bias(i, j)))
}

fn add(to: &mut [f64], factor: f64, x: &[f64]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}

/// The exact gradients.
pub fn differentiate(head: &Head, of: &ForwardResults, score: &Score) -> HeadGradients {
    let [d, dv] = head.dims;
    let (scale, cap) = (score.scales.map(f64::from).iter().product::<f64>(), f64::from(score.softcap));
    let sink = score.sink.map_or(f64::NEG_INFINITY, f64::from);
    let mut gradients = HeadGradients::zeros(head);
    for i in 0..head.len_q {
        let visible = head.visible(score.mask, i);
        // (score, derivative of the soft cap)
        let scores: Vec<(f64, f64)> = visible
            .iter()
            .map(|&j| {
                let s = scale * dot((head.query)(i), (head.key)(j));
                let t = (s / cap).tanh();
                let (s, slope) = if cap > 0.0 { (cap * t, 1.0 - t * t) } else { (s, 1.0) };
                (s + biases(head, score, i, j).sum::<f64>(), slope)
            })
            .collect();
        let largest = scores.iter().map(|s| s.0).fold(sink, f64::max);
        if largest == f64::NEG_INFINITY {
            continue;
        }
        let sink_weight = (sink - largest).exp();
        let sum = scores.iter().map(|s| (s.0 - largest).exp()).sum::<f64>() + sink_weight;
        let p: Vec<f64> = scores.iter().map(|s| (s.0 - largest).exp() / sum).collect();
        let dp: Vec<f64> = visible.iter().map(|&j| dot((of.dout)(i), (head.value)(j))).collect();
        let delta = dot(&p, &dp) - (of.dlse)(i);
        gradients.dsink -= sink_weight / sum * delta;
        for (index, j) in visible.into_iter().enumerate() {
            let of_logit = p[index] * (dp[index] - delta);
            let ds = scale * of_logit * scores[index].1;
            if head.bias.is_some() {
                gradients.dbias[i * head.len_k + j] = of_logit;
            }
            add(&mut gradients.dq[i * d..][..d], ds, (head.key)(j));
            add(&mut gradients.dk[j * d..][..d], ds, (head.query)(i));
            add(&mut gradients.dv[j * dv..][..dv], p[index], (of.dout)(i));
        }
    }
    gradients
}

/// The formula in arrays of `dtype`: products accumulate in f32, each intermediate array is rounded to `dtype`, the
/// softmax is in f32, and delta is computed from the stored output. If a number overflows, the intermediate arrays are
/// f32 instead.
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
    let HeadGradients { dq, dk, dv, dbias, .. } = &mut wide;
    [dq, dk, dv, dbias].into_iter().flatten().for_each(|x| *x = f64::from(round(*x as f32)));
    wide
}

/// [`differentiate_naively`] with a rounding function for intermediate numbers.
fn differentiate_rounding(
    head: &Head,
    of: &ForwardResults,
    score: &Score,
    round: impl Fn(f32) -> f32,
) -> HeadGradients {
    let [d, dv] = head.dims;
    let (scale, cap) = (score.scales.iter().product::<f32>(), score.softcap);
    let sink = score.sink.unwrap_or(f32::NEG_INFINITY);
    // Sums are f32 numbers that are stored as f64.
    let add = |to: &mut [f64], factor: f32, x: &[f64]| {
        to.iter_mut().zip(x).for_each(|(to, x)| *to = f64::from(*to as f32 + factor * *x as f32));
    };
    let mut gradients = HeadGradients::zeros(head);
    for i in 0..head.len_q {
        let visible = head.visible(score.mask, i);
        let scores: Vec<(f32, f32)> = visible
            .iter()
            .map(|&j| {
                let s = round(scale * round(dot_in_f32((head.query)(i), (head.key)(j))));
                let t = round((s / cap).tanh());
                let (s, slope) = if cap > 0.0 { (round(cap * t), round(1.0 - t * t)) } else { (s, 1.0) };
                (biases(head, score, i, j).fold(s, |s, bias| round(s + round(bias as f32))), slope)
            })
            .collect();
        let largest = scores.iter().map(|s| s.0).fold(sink, f32::max);
        if largest == f32::NEG_INFINITY {
            continue;
        }
        let sink_weight = (sink - largest).exp();
        let sum = scores.iter().map(|s| (s.0 - largest).exp()).sum::<f32>() + sink_weight;
        // The probabilities are computed from the lse in f32, because a forward pass stores nothing else.
        let lse = largest + sum.ln();
        let delta = dot_in_f32((of.out)(i), (of.dout)(i)) - (of.dlse)(i) as f32;
        gradients.dsink = f64::from(gradients.dsink as f32 - round(round((sink - lse).exp()) * delta));
        for (s, j) in scores.into_iter().zip(visible) {
            let p = round((s.0 - lse).exp());
            let dp = round(dot_in_f32((of.dout)(i), (head.value)(j)));
            let of_logit = round(p * (dp - delta));
            let ds = round(of_logit * s.1);
            if head.bias.is_some() {
                gradients.dbias[i * head.len_k + j] = f64::from(of_logit);
            }
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
