//! The reference for gradients agrees with finite differences of the reference for the forward pass.

use crate::support::{
    F16, F32, ForwardResults, Head, Mask, Numbers, Random, Score, attend, differentiate, differentiate_naively,
};

const LEN_Q: usize = 4;
const LEN_K: usize = 5;
const D: usize = 3;
const DV: usize = 2;

/// Offsets of the queries, keys, values and the sink in the list of all numbers.
const PARTS: [usize; 5] =
    [0, LEN_Q * D, (LEN_Q + LEN_K) * D, (LEN_Q + LEN_K) * D + LEN_K * DV, (LEN_Q + LEN_K) * D + LEN_K * DV + 1];

fn row(x: &[f64], part: usize, i: usize, d: usize) -> &[f64] {
    &x[PARTS[part] + i * d..][..d]
}

/// A head whose inputs are these numbers.
fn head(x: &[f64], leftpad: usize) -> Head<'_> {
    let of = |part, d| Box::new(move |i| row(x, part, i, d));
    let (query, key, value) = (of(0, D), of(1, D), of(2, DV));
    let bounds = Box::new(|_| (None, None));
    Head {
        len_q: LEN_Q,
        len_k: LEN_K,
        leftpad,
        bounds,
        tree: None,
        bias: None,
        dequantized: false,
        dims: [D, DV],
        query,
        key,
        value,
    }
}

/// `sum out * dout + sum lse * dlse` as a function of all numbers.
fn weighed(x: &[f64], score: &Score, leftpad: usize, dout: &[f64], dlse: &[f64]) -> f64 {
    let score = Score { sink: score.sink.map(|_| x[PARTS[3]] as f32), ..*score };
    let row_sum = |i: usize| {
        let actual = attend(&head(x, leftpad), i, &score);
        let out: f64 = actual.out.iter().zip(&dout[i * DV..]).map(|(o, d)| o * d).sum();
        out + if actual.lse.is_finite() { actual.lse * dlse[i] } else { 0.0 }
    };
    (0..LEN_Q).map(row_sum).sum()
}

/// The rows of `out` and of their cotangents.
fn results<'a>(out: &'a [f64], dout: &'a [f64], dlse: &'a [f64]) -> ForwardResults<'a> {
    let rows = |all: &'a [f64]| Box::new(move |i: usize| &all[i * DV..][..DV]);
    ForwardResults { out: rows(out), dout: rows(dout), dlse: Box::new(|i| dlse[i]) }
}

#[test]
fn gradients_are_the_slopes_of_the_forward_reference() {
    let plain =
        Score { scales: [0.7, 1.0, 1.0], softcap: 0.0, slope: None, sink: None, v_scale: 1.0, mask: Mask::FULL };
    let scores = [
        plain,
        Score { mask: Mask::CAUSAL.top_left(), ..plain },
        Score { mask: Mask::window(1, -1), ..plain },
        // Row 0 attends to no key.
        Score { mask: Mask::window(-1, -1).top_left(), softcap: 0.8, ..plain },
        Score { slope: Some(0.3), ..plain },
        Score { sink: Some(0.25), mask: Mask::sliding(2).top_left(), ..plain },
        Score { sink: Some(-0.5), softcap: 1.5, slope: Some(0.1), mask: Mask::CAUSAL, ..plain },
    ];
    for (index, (score, leftpad)) in scores.iter().flat_map(|score| [(score, 0), (score, 2)]).enumerate() {
        let mut random = Random::new(index as u64);
        let mut x: Vec<f64> = (0..PARTS[4]).map(|_| random.normal()).collect();
        // A power of two, so that adding the step is exact in f32.
        x[PARTS[3]] = f64::from(score.sink.unwrap_or(0.0));
        let dout: Vec<f64> = (0..LEN_Q * DV).map(|_| random.normal()).collect();
        let dlse: Vec<f64> = (0..LEN_Q).map(|_| random.normal()).collect();
        let actual = differentiate(&head(&x, leftpad), &results(&dout, &dout, &dlse), score);
        let actual: Vec<f64> = [actual.dq, actual.dk, actual.dv, vec![actual.dsink]].concat();
        for (at, actual) in actual.iter().enumerate() {
            let step = 2f64.powi(if at == PARTS[3] { -12 } else { -16 });
            let moved = |by: f64| {
                let mut x = x.clone();
                x[at] += by;
                weighed(&x, score, leftpad, &dout, &dlse)
            };
            let slope = (moved(step) - moved(-step)) / (2.0 * step);
            assert!((actual - slope).abs() < 1e-6, "{score:?}, leftpad {leftpad}: number {at}: {actual}, not {slope}");
        }
    }
}

#[test]
fn the_naive_formula_is_the_same_but_for_rounding() {
    let mut random = Random::new(3);
    let mut numbers = |count: usize| -> Vec<f64> { (0..count).map(|_| F16.round(random.normal())).collect() };
    let (x, dout, dlse) = (numbers(PARTS[3]), numbers(LEN_Q * DV), numbers(LEN_Q));
    let (head, mask) = (head(&x, 1), Mask::window(3, 1));
    let score = Score { scales: [0.5, 1.0, 1.0], softcap: 2.0, slope: Some(0.25), sink: Some(0.5), v_scale: 1.0, mask };
    let out: Vec<f64> = (0..LEN_Q).flat_map(|i| attend(&head, i, &score).out).collect();
    let of = results(&out, &dout, &dlse);
    let exact = differentiate(&head, &of, &score);
    for (dtype, bound) in [(F32, 1e-5), (F16, 1e-2)] {
        let naive = differentiate_naively(&head, &of, &score, dtype);
        let pairs = [(&naive.dq, &exact.dq), (&naive.dk, &exact.dk), (&naive.dv, &exact.dv)];
        let off = pairs.iter().flat_map(|(a, b)| a.iter().zip(*b)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let off = off.max((naive.dsink - exact.dsink).abs());
        assert!(off < bound && (dtype == F32 || off > 1e-5), "{dtype:?}: off by {off:e}");
    }
}
