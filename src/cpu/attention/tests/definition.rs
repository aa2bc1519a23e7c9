//! SPEC 2.1 in f64, from a batch's shape and its numbers alone.

use super::batch::Batch;
use super::shape::Shape;

/// `out [Tq, Hq, Dv]`, widened, and `lse [Hq, Tq]`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    pub(super) out: Vec<f64>,
    pub(super) lse: Vec<f64>,
}

impl Shape {
    /// Position of query `i` of sequence `b` among the keys.
    fn position(&self, b: usize, i: usize) -> i64 {
        let (len_q, len_k) = self.lengths[b];
        i as i64 + if self.top_left { 0 } else { len_k as i64 - len_q as i64 }
    }

    /// Keys that query `i` of sequence `b` sees.
    pub(super) fn visible(&self, b: usize, i: usize) -> impl Iterator<Item = usize> + use<> {
        let (position, leftpad, (left, right)) = (self.position(b, i), self.leftpad_of(b), self.window);
        (leftpad..self.lengths[b].1).filter(move |j| {
            let distance = *j as i64 - position;
            (left < 0 || distance >= -left) && (right < 0 || distance <= right)
        })
    }
}

impl Batch {
    /// The scores of query `i` of sequence `b` and the keys it sees, for one query head.
    fn scores(&self, b: usize, i: usize, h: usize) -> Vec<(usize, f64)> {
        let shape = &self.shape;
        let kv_head = h / (shape.q_heads / shape.kv_heads);
        let scale = f64::from(shape.softmax_scale())
            * self.factor(&self.q_scale, kv_head)
            * self.factor(&self.k_scale, kv_head);
        let cap = f64::from(shape.softcap);
        let q = self.query_row(self.row(b, i), h);
        let score = |j: usize| {
            let k = self.key_row(b, j, kv_head);
            let mut s = scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
            if cap > 0.0 {
                s = cap * (s / cap).tanh();
            }
            let slope = match self.shape.alibi {
                None => return s,
                Some(per_sequence) => self.slopes[if per_sequence { b * shape.q_heads + h } else { h }],
            };
            s - f64::from(slope) * (shape.position(b, i) - j as i64).abs() as f64
        };
        shape.visible(b, i).map(|j| (j, score(j))).collect()
    }

    fn factor(&self, scale: &[f32], kv_head: usize) -> f64 {
        match self.shape.scales {
            None => 1.0,
            Some(per_head) => f64::from(scale[if per_head { kv_head } else { 0 }]),
        }
    }

    /// Rows of no sequence included.
    pub(super) fn expected(&self) -> Answer {
        let Shape { q_heads, kv_heads, dv, .. } = self.shape;
        let rows = self.rows();
        let mut answer = Answer { out: vec![0.0; rows * q_heads * dv], lse: vec![f64::NEG_INFINITY; q_heads * rows] };
        for b in 0..self.shape.lengths.len() {
            for (i, h) in (0..self.shape.lengths[b].0).flat_map(|i| (0..q_heads).map(move |h| (i, h))) {
                let row = self.row(b, i);
                let scores = self.scores(b, i, h);
                let sink = if self.shape.sinks { f64::from(self.sinks[h]) } else { f64::NEG_INFINITY };
                let largest = scores.iter().map(|(_, s)| *s).fold(sink, f64::max);
                if largest == f64::NEG_INFINITY {
                    continue;
                }
                let sum = scores.iter().map(|(_, s)| (s - largest).exp()).sum::<f64>() + (sink - largest).exp();
                answer.lse[h * rows + row] = largest + sum.ln();
                let kv_head = h / (q_heads / kv_heads);
                let v_scale = self.factor(&self.v_scale, kv_head);
                let o = &mut answer.out[(row * q_heads + h) * dv..][..dv];
                for (j, s) in scores {
                    let weight = (s - largest).exp() / sum * v_scale;
                    o.iter_mut().zip(self.value_row(b, j, kv_head)).for_each(|(o, v)| *o += weight * v);
                }
            }
        }
        answer
    }
}
