//! The reference itself: its gradients are the slopes of what the reference of the forward pass gives.

use crate::support::array::{F16, F32};
use crate::support::gradients::{OneHead, differentiate, differentiate_naively};
use crate::support::oracle::{Mask, Row, Score, attend};
use crate::support::random::Random;

const LEN_Q: usize = 4;
const LEN_K: usize = 5;
const D: usize = 3;
const DV: usize = 2;

/// Where the queries, the keys, the values and the sink stand among the numbers of a head.
const PARTS: [usize; 5] =
    [0, LEN_Q * D, (LEN_Q + LEN_K) * D, (LEN_Q + LEN_K) * D + LEN_K * DV, (LEN_Q + LEN_K) * D + LEN_K * DV + 1];

fn row(x: &[f64], part: usize, i: usize, d: usize) -> &[f64] {
    &x[PARTS[part] + i * d..][..d]
}

/// `sum out * dout + sum lse * dlse` as a function of queries, keys, values and sink.
fn weighed(x: &[f64], score: &Score, leftpad: usize, dout: &[f64], dlse: &[f64]) -> f64 {
    let (key, value) = (|j| row(x, 1, j, D), |j| row(x, 2, j, DV));
    let score = Score { sink: score.sink.map(|_| x[PARTS[3]] as f32), ..*score };
    let of_row = |i: usize| {
        let query = row(x, 0, i, D);
        let (len_q, len_k) = (LEN_Q, LEN_K);
        let row = Row { i, len_q, len_k, leftpad, query, key: &key, value: &value, value_dim: DV };
        let found = attend(&row, &score);
        let out: f64 = found.out.iter().zip(&dout[i * DV..]).map(|(o, d)| o * d).sum();
        out + if found.lse.is_finite() { found.lse * dlse[i] } else { 0.0 }
    };
    (0..LEN_Q).map(of_row).sum()
}

#[test]
fn gradients_are_the_slopes_of_the_forward_reference() {
    let plain =
        Score { scales: [0.7, 1.0, 1.0], softcap: 0.0, slope: None, sink: None, v_scale: 1.0, mask: Mask::FULL };
    let scores = [
        plain,
        Score { mask: Mask::CAUSAL.top_left(), ..plain },
        Score { mask: Mask::window(1, -1), ..plain },
        // Row 0 sees nothing.
        Score { mask: Mask::window(-1, -1).top_left(), softcap: 0.8, ..plain },
        Score { slope: Some(0.3), ..plain },
        Score { sink: Some(0.25), mask: Mask::sliding(2).top_left(), ..plain },
        Score { sink: Some(-0.5), softcap: 1.5, slope: Some(0.1), mask: Mask::CAUSAL, ..plain },
    ];
    for (index, (score, leftpad)) in scores.iter().flat_map(|score| [(score, 0), (score, 2)]).enumerate() {
        let mut random = Random::new(index as u64);
        let mut x: Vec<f64> = (0..PARTS[4]).map(|_| random.normal()).collect();
        // A power of two, so that a step of it is one in f32 too.
        x[PARTS[3]] = f64::from(score.sink.unwrap_or(0.0));
        let dout: Vec<f64> = (0..LEN_Q * DV).map(|_| random.normal()).collect();
        let dlse: Vec<f64> = (0..LEN_Q).map(|_| random.normal()).collect();
        let (query, key, value) = (|i| row(&x, 0, i, D), |j| row(&x, 1, j, D), |j| row(&x, 2, j, DV));
        let (of_out, of_lse) = (|i: usize| &dout[i * DV..][..DV], |i: usize| dlse[i]);
        let head = OneHead {
            len_q: LEN_Q,
            len_k: LEN_K,
            leftpad,
            head_dim: D,
            value_dim: DV,
            query: &query,
            key: &key,
            value: &value,
            out: &of_out,
            dout: &of_out,
            dlse: &of_lse,
        };
        let found = differentiate(&head, score);
        let found: Vec<f64> = [found.dq, found.dk, found.dv, vec![found.dsink]].concat();
        for (at, found) in found.iter().enumerate() {
            let step = 2f64.powi(if at == PARTS[3] { -12 } else { -16 });
            let moved = |by: f64| {
                let mut x = x.clone();
                x[at] += by;
                weighed(&x, score, leftpad, &dout, &dlse)
            };
            let slope = (moved(step) - moved(-step)) / (2.0 * step);
            assert!((found - slope).abs() < 1e-6, "{score:?}, leftpad {leftpad}: number {at}: {found}, not {slope}");
        }
    }
}

#[test]
fn the_naive_formula_is_the_same_but_for_rounding() {
    let mut random = Random::new(3);
    let mut numbers = |count: usize| -> Vec<f64> { (0..count).map(|_| F16.round(random.normal())).collect() };
    let (q, k, v, dout, dlse) = (numbers(8), numbers(12), numbers(12), numbers(8), numbers(4));
    let (of_q, of_k, of_v) = (|i| row_of(&q, i), |i| row_of(&k, i), |i| row_of(&v, i));
    let mask = Mask::window(3, 1);
    let score = Score { scales: [0.5, 1.0, 1.0], softcap: 2.0, slope: Some(0.25), sink: Some(0.5), v_scale: 1.0, mask };
    let (len_q, len_k) = (4, 6);
    let out: Vec<f64> = (0..len_q)
        .flat_map(|i| {
            let row = Row { i, len_q, len_k, leftpad: 1, query: of_q(i), key: &of_k, value: &of_v, value_dim: 2 };
            attend(&row, &score).out
        })
        .collect();
    let head = OneHead {
        len_q,
        len_k,
        leftpad: 1,
        head_dim: 2,
        value_dim: 2,
        query: &of_q,
        key: &of_k,
        value: &of_v,
        out: &|i| row_of(&out, i),
        dout: &|i| row_of(&dout, i),
        dlse: &|i| dlse[i],
    };
    let exact = differentiate(&head, &score);
    for (dtype, most) in [(F32, 1e-5), (F16, 1e-2)] {
        let naive = differentiate_naively(&head, &score, dtype);
        let pairs = [(&naive.dq, &exact.dq), (&naive.dk, &exact.dk), (&naive.dv, &exact.dv)];
        let off = pairs.iter().flat_map(|(a, b)| a.iter().zip(*b)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let off = off.max((naive.dsink - exact.dsink).abs());
        assert!(off < most && (dtype == F32 || off > 1e-5), "{dtype:?}: off by {off:e}");
    }
}

fn row_of(x: &[f64], i: usize) -> &[f64] {
    &x[2 * i..][..2]
}
