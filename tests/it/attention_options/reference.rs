//! The reference agrees with numbers that were computed by hand.

use crate::support::{
    AttentionRow, BF16, F16, F32, Head, Mask, Numbers, Random, Score, attend, attend_naively, distance, lse_tolerance,
};

/// For each of `len_q` rows, which of `len_k` keys it attends to.
fn visibility(mask: Mask, len_q: usize, len_k: usize, leftpad: usize) -> Vec<String> {
    let row = |i| {
        let visible = mask.visible(i, len_q, len_k, leftpad);
        (0..len_k).map(|j| if visible.contains(&j) { 'x' } else { '.' }).collect()
    };
    (0..len_q).map(row).collect()
}

#[test]
fn masks_show_the_documented_keys() {
    let causal = Mask::CAUSAL;
    let rows: [(Mask, usize, usize, usize, &[&str]); 14] = [
        (Mask::FULL, 2, 3, 0, &["xxx", "xxx"]),
        (Mask::FULL, 2, 3, 2, &["..x", "..x"]),
        (Mask::FULL.top_left(), 2, 3, 0, &["xxx", "xxx"]),
        (causal, 2, 4, 0, &["xxx.", "xxxx"]),
        (causal, 4, 2, 0, &["..", "..", "x.", "xx"]),
        (causal, 2, 4, 1, &[".xx.", ".xxx"]),
        (causal.top_left(), 2, 4, 0, &["x...", "xx.."]),
        (causal.top_left(), 4, 2, 0, &["x.", "xx", "xx", "xx"]),
        (causal.top_left(), 3, 4, 2, &["....", "....", "..x."]),
        (Mask { window_right: 3, ..causal }, 2, 4, 0, &["xxx.", "xxxx"]),
        (Mask::sliding(2), 2, 4, 0, &[".xx.", "..xx"]),
        (Mask::window(1, 1), 3, 5, 0, &[".xxx.", "..xxx", "...xx"]),
        (Mask::window(0, 1).top_left(), 3, 3, 0, &["xx.", ".xx", "..x"]),
        (Mask::window(-1, 0), 2, 4, 0, &["xxx.", "xxxx"]),
    ];
    for (mask, len_q, len_k, leftpad, expected) in rows {
        assert_eq!(
            visibility(mask, len_q, len_k, leftpad),
            expected,
            "{mask:?}, {len_q} over {len_k}, leftpad {leftpad}"
        );
    }
    // Windows that are wider than any number of keys.
    assert_eq!(visibility(Mask::window(i64::MAX, i64::MAX), 2, 3, 0), visibility(Mask::FULL, 2, 3, 0));
    assert_eq!(visibility(Mask::window(-1, i64::MAX).top_left(), 2, 3, 0), visibility(Mask::FULL, 2, 3, 0));
}

const PLAIN: Score = Score { scales: [1.0; 3], softcap: 0.0, slope: None, sink: None, v_scale: 1.0, mask: Mask::FULL };

/// `len_q` equal queries, over these keys and values.
fn head<'a>(len_q: usize, leftpad: usize, query: &'a [f64], k: &'a [f64], v: &'a [f64]) -> Head<'a> {
    let d = query.len();
    let rows = |x: &'a [f64]| Box::new(move |j: usize| &x[j * d..][..d]);
    let query = Box::new(move |_| query);
    let bounds = Box::new(|_| (None, None));
    Head {
        len_q,
        len_k: k.len() / d,
        leftpad,
        bounds,
        tree: None,
        bias: None,
        dequantized: false,
        dims: [d; 2],
        query,
        key: rows(k),
        value: rows(v),
    }
}

/// The result for the last of `len_q` rows, over keys and values of one element.
fn last_of(len_q: usize, q: f64, k: &[f64], v: &[f64], score: Score) -> AttentionRow {
    attend(&head(len_q, 0, &[q], k, v), len_q - 1, &score)
}

fn is(actual: &AttentionRow, out: f64, lse: f64) {
    assert!((actual.out[0] - out).abs() < 1e-12 && (actual.lse - lse).abs() < 1e-12, "{actual:?}, not {out} and {lse}");
}

#[test]
fn equal_scores_give_the_mean() {
    let (k, v) = ([3.0, -1.0, 7.0, 2.0], [1.0, 2.0, 3.0, 6.0]);
    is(&last_of(1, 0.0, &k, &v, PLAIN), 3.0, 4f64.ln());
    is(&last_of(1, 0.0, &k, &v, Score { mask: Mask::sliding(2), ..PLAIN }), 4.5, 2f64.ln());
    is(&last_of(2, 0.0, &k, &v, Score { mask: Mask::CAUSAL.top_left(), ..PLAIN }), 1.5, 2f64.ln());
}

#[test]
fn one_key_gives_its_value_and_its_score() {
    is(&last_of(1, 3.0, &[2.0], &[5.0], PLAIN), 5.0, 6.0);
    let scaled = Score { scales: [0.5, 3.0, 4.0], v_scale: 7.0, ..PLAIN };
    is(&last_of(1, 3.0, &[2.0], &[5.0], scaled), 35.0, 36.0);
    is(&last_of(1, 3.0, &[2.0], &[5.0], Score { softcap: 4.0, ..PLAIN }), 5.0, 4.0 * 1.5f64.tanh());
}

#[test]
fn two_keys_are_weighted_by_their_exponentials() {
    // The weights are 1 and 3.
    let k = [0.0, 3f64.ln()];
    is(&last_of(1, 1.0, &k, &[4.0, 8.0], PLAIN), 7.0, 4f64.ln());
}

#[test]
fn the_alibi_bias_grows_with_the_distance_on_either_side() {
    let slope = Score { slope: Some(0.5), ..PLAIN };
    // The last of two queries is at the position of key 2; key 0 is two positions before it.
    let first = Score { mask: Mask::window(-1, 0), ..slope };
    let weights: Vec<f64> = [2.0f64, 1.0, 0.0].iter().map(|d| (-0.5 * d).exp()).collect();
    let total: f64 = weights.iter().sum();
    is(&last_of(2, 0.0, &[9.0; 3], &[1.0, 0.0, 0.0], first), weights[0] / total, total.ln());
    // The first query is at the position of key 0. The keys after it are as far as those before it were.
    is(
        &last_of(1, 0.0, &[9.0; 3], &[1.0, 0.0, 0.0], Score { mask: Mask::FULL.top_left(), ..slope }),
        1.0 / total,
        total.ln(),
    );
    // The bias is added after the soft cap.
    let capped = Score { softcap: 1.0, mask: Mask::FULL.top_left(), ..slope };
    is(&last_of(3, 1000.0, &[1.0], &[1.0], capped), 1.0, 1.0 - 0.5 * 2.0);
}

#[test]
fn a_sink_is_a_column_of_value_0_neither_scaled_nor_capped() {
    let sink = Score { sink: Some(0.0), ..PLAIN };
    is(&last_of(1, 0.0, &[1.0; 3], &[1.0, 2.0, 5.0], sink), 2.0, 4f64.ln());
    let sink = Score { sink: Some(50.0), scales: [0.01, 1.0, 1.0], softcap: 0.5, ..PLAIN };
    is(&last_of(1, 0.0, &[1.0], &[1.0], sink), (-50f64).exp() / (1.0 + (-50f64).exp()), 50.0 + (-50f64).exp().ln_1p());
    let none = Score { sink: Some(f32::NEG_INFINITY), ..PLAIN };
    assert_eq!(last_of(1, 0.5, &[1.0; 3], &[1.0, 2.0, 5.0], none), last_of(1, 0.5, &[1.0; 3], &[1.0, 2.0, 5.0], PLAIN));
}

#[test]
fn a_row_that_attends_to_no_key_is_0_and_its_lse_the_sink() {
    let causal = Score { mask: Mask::CAUSAL, ..PLAIN };
    let (ones, padded) = (head(2, 0, &[1.0], &[1.0], &[1.0]), head(2, 1, &[1.0], &[1.0], &[1.0]));
    let nothing = AttentionRow { out: vec![0.0], lse: f64::NEG_INFINITY, sees_a_key: false };
    assert_eq!(attend(&ones, 0, &causal), nothing);
    assert_eq!(attend_naively(&ones, 0, &causal, F16), nothing);
    let sink = Score { sink: Some(2.5), ..causal };
    assert_eq!(attend(&ones, 0, &sink), AttentionRow { lse: 2.5, ..nothing.clone() });
    assert_eq!(attend(&padded, 1, &causal), nothing);
}

#[test]
fn the_naive_formula_is_off_by_the_rounding_of_its_type() {
    let mut random = Random::new(3);
    let d = 32;
    let mut draw = |rows: usize| -> Vec<f64> { (0..rows * d).map(|_| BF16.round(random.normal())).collect() };
    let (query, k, v) = (draw(1), draw(50), draw(50));
    let head = head(1, 3, &query, &k, &v);
    let options = Score {
        scales: [0.2, 0.5, 1.5],
        softcap: 3.0,
        slope: Some(0.1),
        sink: Some(0.7),
        v_scale: 1.2,
        mask: Mask::window(40, -1),
    };
    for score in [PLAIN, options] {
        let exact = attend(&head, 0, &score);
        for (dtype, lower, upper) in [(F32, 0.0, 3e-6), (F16, 3e-6, 1e-2), (BF16, 3e-4, 1e-1)] {
            let naive = attend_naively(&head, 0, &score, dtype);
            let off = distance(&naive.out, &exact.out);
            assert!((lower..upper).contains(&off), "{dtype:?} is off by {off:e}");
            assert!((naive.lse - exact.lse).abs() < upper, "{dtype:?}");
        }
    }
}

#[test]
fn the_naive_formula_survives_scores_that_overflow_its_type() {
    let (k, v) = ([300.0, 299.0], [1.0, 0.3]);
    // A score of 90000 is infinite in f16. The intermediate arrays are then f32, and only the output is rounded to f16.
    let naive = attend_naively(&head(1, 0, &[300.0], &k, &v), 0, &PLAIN, F16);
    assert_eq!((naive.out[0], naive.lse), (1.0, 90000.0));
    let second = head(1, 0, &[300.0], &[299.0, 300.0], &v);
    assert_eq!(attend_naively(&second, 0, &PLAIN, F16).out, [F16.round(0.3)]);
}

#[test]
fn the_lse_tolerance_is_the_documented_one() {
    let close = |actual: f64, expected: f64| assert!((actual - expected).abs() < 1e-15, "{actual}, not {expected}");
    close(lse_tolerance(-0.5, F32.into(), true), 1e-4);
    close(lse_tolerance(-30.0, BF16.into(), false), 3e-3);
    close(lse_tolerance(-30.0, BF16.into(), true), 0.6);
    close(lse_tolerance(0.1, F16.into(), true), 2e-2);
}
