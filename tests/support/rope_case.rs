//! Calls of `rope_kv_cache_update`, and the results that they must have (`docs/semantics.md#rope_kv_cache_update`).

use super::{
    Array, Attr, CacheUpdateCase, F32, Invocation, Numbers, Random, any_bits, dims_of, for_each_side, i32s,
    kv_cache_update, numbers,
};
use xla_attention::Op;

with_defaults! {
    /// A call in numbers: the update of a cache in one buffer, and the rotation of its keys and of the queries.
    #[derive(Clone, Debug)]
    pub struct RopeCase {
        pub update: CacheUpdateCase = CacheUpdateCase::default(),
        pub q_heads: usize = 4,
        /// rot, the number of elements per head that are rotated.
        pub rotated: usize = 16,
        pub max_pos: usize = 9,
        /// One per token.
        pub positions: Vec<i32> = vec![3, 0, 8, 5],
        pub interleaved: bool = false,
    }
}

impl RopeCase {
    fn dims(&self, heads: usize) -> Vec<i64> {
        dims_of(&[self.update.slots.len(), heads, self.update.dims[0]])
    }

    /// Number of rotated elements per head; 0 without a table.
    fn turned(&self) -> usize {
        if self.max_pos == 0 { 0 } else { self.rotated }
    }

    /// Rows of random numbers. Elements that are copied have random bits.
    fn rows(&self, heads: usize, copied: bool, seed: u64) -> Array {
        let (dtype, d) = (self.update.dtype, self.update.dims[0]);
        let mut rows = numbers(dtype, &self.dims(heads), seed);
        if copied {
            let (size, bits) = (dtype.size(), any_bits(dtype, &self.dims(heads), seed + 1));
            for head in (0..rows.bytes.len()).step_by(d * size) {
                let past = head + self.turned() * size..head + d * size;
                rows.bytes[past.clone()].copy_from_slice(&bits.bytes[past]);
            }
        }
        rows
    }

    pub fn query(&self) -> Array {
        self.rows(self.q_heads, true, self.update.seed + 500)
    }

    pub fn key(&self) -> Array {
        let copied = self.update.fp8.is_none() && self.update.scales[0].is_none();
        self.rows(self.update.heads, copied, self.update.seed + 300)
    }

    pub fn value(&self) -> Array {
        let copied = self.update.fp8.is_none() && self.update.scales[1].is_none();
        let make = if copied { any_bits } else { numbers };
        make(self.update.dtype, &self.dims(self.update.heads), self.update.seed + 400)
    }

    /// The row of `cos_sin` that a token reads.
    fn row_of(&self, token: usize) -> usize {
        i64::from(self.positions[token]).clamp(0, self.max_pos as i64 - 1) as usize
    }

    /// `[max_pos, rot]`: cosines and sines of random angles; NaN in rows that no token reads.
    pub fn cos_sin(&self) -> Array {
        let mut table = vec![f64::NAN; self.max_pos * self.rotated];
        let mut random = Random::new(self.update.seed + 600);
        let half = self.rotated / 2;
        if self.turned() > 0 {
            for row in (0..self.positions.len()).map(|token| self.row_of(token)) {
                for i in 0..half {
                    let angle = std::f64::consts::TAU * random.unit();
                    table[row * self.rotated + i] = F32.round(angle.cos());
                    table[row * self.rotated + half + i] = F32.round(angle.sin());
                }
            }
        }
        Array::new(F32, &[self.max_pos as i64, self.rotated as i64], &table)
    }

    pub fn invocation(&self, in_place: bool) -> Invocation {
        let query = self.query();
        let operand = |name: &str| match name {
            "query" => Some(query.clone()),
            "key" => Some(self.key()),
            "value" => Some(self.value()),
            "positions" => Some(i32s(&self.positions)),
            "cos_sin" => Some(self.cos_sin()),
            _ => self.update.operand(name),
        };
        let attribute = |name: &str| match name {
            "interleaved" => Attr::Bool(self.interleaved),
            _ => Attr::I64(self.update.layout.kv_layout()),
        };
        let mut call = Invocation::of(Op::RopeKvCacheUpdate, operand, attribute);
        call.description = format!("{self:?}, in place: {in_place}");
        call.updated("kv_cache", 0, in_place).result("query_out", query.dtype, &query.dims)
    }

    /// `rows [T, heads, D]` with the first elements of each head rotated in f32.
    fn turn(&self, rows: &Array) -> Vec<f64> {
        let (heads, d, half) = (rows.dims[1] as usize, self.update.dims[0], self.rotated / 2);
        let (mut turned, table) = (rows.values(), self.cos_sin().values());
        if self.turned() == 0 {
            return turned;
        }
        for (index, head) in turned.chunks_exact_mut(d).enumerate() {
            let angles = &table[self.row_of(index / heads) * self.rotated..][..self.rotated];
            for i in 0..half {
                let (first, second) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
                let (cos, sin) = (angles[i], angles[half + i]);
                let (a, b) = turn_pair((head[first], head[second]), cos, sin);
                (head[first], head[second]) = (a, b);
            }
        }
        turned
    }

    /// The cache and `query_out`.
    pub fn expected(&self) -> [Array; 2] {
        let (update, key, query) = (&self.update, self.key(), self.query());
        // The rotated keys are f32, so that a cache rounds them once. Elements that are copied are restored afterwards.
        let rows = [Array::new(F32, &key.dims, &self.turn(&key)), self.value()];
        let cache =
            kv_cache_update(&update.caches(), &update.kv_geometry(), &rows, &update.slots, &update.scales).remove(0);
        let cache = if update.fp8.is_none() && update.scales[0].is_none() { self.restore_copied(cache) } else { cache };
        let mut query_out = Array::new(query.dtype, &query.dims, &self.turn(&query));
        restore(&mut query_out, &query, update.dims[0], self.turned());
        [cache, query_out]
    }

    /// `cache` with the bits of the keys' unrotated elements, which keep the payload of a NaN.
    fn restore_copied(&self, mut cache: Array) -> Array {
        let (update, key) = (&self.update, self.key());
        let (size, kv_geometry) = (key.dtype.size(), update.kv_geometry());
        let stored =
            update.slots.iter().enumerate().filter_map(|(token, &slot)| Some((token, kv_geometry.valid_slot(slot)?)));
        for ((token, slot), head) in stored.flat_map(|row| (0..update.heads).map(move |head| (row, head))) {
            let from = (token * update.heads + head) * update.dims[0] * size;
            let past = self.turned() * size..update.dims[0] * size;
            let to = &mut cache.bytes[kv_geometry.slot_element(0, slot, head).1 * size..];
            to[past.clone()].copy_from_slice(&key.bytes[from..][past]);
        }
        cache
    }

    /// Asserts that the call has the expected results, in place and with a separate cache.
    pub fn assert_matches_reference(&self) {
        let expected = self.expected();
        for in_place in [true, false] {
            for_each_side(|side| {
                let actual = self.invocation(in_place).results(side);
                assert!(actual[0] == expected[0], "{self:?}, in place: {in_place}: the cache differs");
                assert!(actual[1] == expected[1], "{self:?}, in place: {in_place}: the queries differ");
            });
        }
    }
}

/// Copies the unrotated elements of each head.
fn restore(out: &mut Array, given: &Array, d: usize, turned: usize) {
    let size = given.dtype.size();
    for head in (0..given.bytes.len()).step_by(d * size) {
        let past = head + turned * size..head + d * size;
        out.bytes[past.clone()].copy_from_slice(&given.bytes[past]);
    }
}

/// The rotation of one pair in f32, computed in f64.
fn turn_pair((a, b): (f64, f64), cos: f64, sin: f64) -> (f64, f64) {
    let [x, y, c, s] = [a, b, cos, sin].map(|number| number as f32);
    let turned = (f64::from(x.mul_add(c, -(y * s))), f64::from(y.mul_add(c, x * s)));
    let exact = (a * cos - b * sin, b * cos + a * sin);
    let allowed = 2f64.powi(-23) * (a.abs() + b.abs());
    assert!((turned.0 - exact.0).abs() <= allowed && (turned.1 - exact.1).abs() <= allowed);
    turned
}
