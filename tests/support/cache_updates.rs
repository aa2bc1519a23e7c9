//! Calls of the cache updates in every layout, what they leave in the caches, and how both compare.

use super::array::{Array, Dtype, F32, count};
use super::guard::for_both_sides;
use super::invocation::{Attr, Invocation};
use super::oracle::kv_cache_update;
use super::random::Random;

/// The layout of K and V in buffers of their own, which has another target and no number.
pub const SPLIT: i64 = 0;

/// A call in numbers.
#[derive(Clone, Debug)]
pub struct Update {
    /// The attribute `kv_layout`, or [`SPLIT`].
    pub layout: i64,
    /// Of keys and values.
    pub dtype: Dtype,
    /// Of the caches, if it is another.
    pub fp8: Option<Dtype>,
    pub num_pages: usize,
    pub page_size: usize,
    pub heads: usize,
    pub head_dim: usize,
    /// D of the values; differs from the keys' only in a split cache.
    pub value_dim: usize,
    pub slots: Vec<i64>,
    pub wide_slots: bool,
    pub k_scale: Option<Vec<f64>>,
    pub v_scale: Option<Vec<f64>>,
    pub seed: u64,
}

impl Default for Update {
    fn default() -> Self {
        Self {
            layout: 1,
            dtype: F32,
            fp8: None,
            num_pages: 3,
            page_size: 4,
            heads: 2,
            head_dim: 16,
            value_dim: 16,
            slots: vec![7, 0, 11, 4],
            wide_slots: false,
            k_scale: None,
            v_scale: None,
            seed: 1,
        }
    }
}

/// Any bit pattern: copying keeps even the payload of a NaN.
pub fn any_bits(dtype: Dtype, dims: &[usize], seed: u64) -> Array {
    let mut random = Random::new(seed);
    let dims: Vec<i64> = dims.iter().map(|&d| d as i64).collect();
    let bytes = (0..count(&dims) * dtype.size()).map(|_| random.next() as u8).collect();
    Array { dtype, dims, bytes }
}

pub fn numbers(dtype: Dtype, dims: &[usize], seed: u64) -> Array {
    let mut random = Random::new(seed);
    let values: Vec<f64> = (0..dims.iter().product::<usize>()).map(|_| 10.0 * random.normal()).collect();
    Array::new(dtype, &dims.iter().map(|&d| d as i64).collect::<Vec<_>>(), &values)
}

impl Update {
    pub fn cache_dtype(&self) -> Dtype {
        self.fp8.unwrap_or(self.dtype)
    }

    /// One cache, or K's and V's, full of anything.
    pub fn caches(&self) -> Vec<Array> {
        let (p, s, h, d) = (self.num_pages, self.page_size, self.heads, self.head_dim);
        let cache = |dims: &[usize], seed| any_bits(self.cache_dtype(), dims, self.seed + seed);
        match self.layout {
            SPLIT => vec![cache(&[p, s, h, d], 100), cache(&[p, s, h, self.value_dim], 200)],
            1 => vec![cache(&[p, s, 2 * h, d], 100)],
            2 => vec![cache(&[2, p, s, h, d], 100)],
            _ => vec![cache(&[p, 2, s, h, d], 100)],
        }
    }

    /// Keys and values: of any bits where these are copied.
    pub fn rows(&self) -> [Array; 2] {
        let scaled = self.k_scale.is_some() || self.v_scale.is_some() || self.fp8.is_some();
        let make = if scaled { numbers } else { any_bits };
        let dims = |d| [self.slots.len(), self.heads, d];
        [
            make(self.dtype, &dims(self.head_dim), self.seed + 300),
            make(self.dtype, &dims(self.value_dim), self.seed + 400),
        ]
    }

    /// The element of the cache at which the row of a slot begins; `kv` is 0 for K, 1 for V.
    pub fn row_of(&self, kv: usize) -> impl Fn(usize, usize) -> usize + use<> {
        let Self { layout, num_pages, page_size, heads, head_dim, value_dim, .. } = *self;
        move |slot, head| {
            let (page, token) = (slot / page_size, slot % page_size);
            match layout {
                SPLIT => (slot * heads + head) * if kv == 0 { head_dim } else { value_dim },
                1 => (slot * 2 * heads + 2 * head + kv) * head_dim,
                2 => (((kv * num_pages + page) * page_size + token) * heads + head) * head_dim,
                _ => (((page * 2 + kv) * page_size + token) * heads + head) * head_dim,
            }
        }
    }

    /// `[T]`, of 32 bits or 64.
    pub fn slot_mapping(&self) -> Array {
        let tokens = [self.slots.len() as i64];
        if self.wide_slots {
            return Array::i64s(&tokens, &self.slots);
        }
        Array::i32s(&tokens, &self.slots.iter().map(|&s| i32::try_from(s).unwrap()).collect::<Vec<_>>())
    }

    /// `call` with the optional operands at its end, as far as they are given.
    pub fn with_scales(&self, mut call: Invocation) -> Invocation {
        let scale = |scale: &Option<Vec<f64>>| match scale {
            Some(values) => Array::new(F32, &[values.len() as i64], values),
            None => Array::left_out(F32),
        };
        if self.k_scale.is_some() || self.v_scale.is_some() {
            call = call.operand("k_scale", scale(&self.k_scale));
        }
        if self.v_scale.is_some() {
            call = call.operand("v_scale", scale(&self.v_scale));
        }
        call
    }

    /// The call, each result in its operand's memory or in its own.
    pub fn invocation(&self, in_place: bool) -> Invocation {
        let caches = self.caches();
        let names: &[&'static str] = if self.layout == SPLIT { &["k_cache", "v_cache"] } else { &["kv_cache"] };
        let target = if self.layout == SPLIT { "xla_gpu_kv_cache_update_split" } else { "xla_gpu_kv_cache_update" };
        let mut call = Invocation::new(target);
        call.what = format!("{self:?}, in place: {in_place}");
        for (name, cache) in names.iter().zip(&caches) {
            call = call.operand(name, cache.clone());
        }
        let [key, value] = self.rows();
        call = call.operand("key", key).operand("value", value).operand("slot_mapping", self.slot_mapping());
        call = self.with_scales(call);
        for (index, name) in names.iter().enumerate() {
            call = if in_place {
                call.result_in_place(name, index)
            } else {
                call.result(name, self.cache_dtype(), &caches[index].dims)
            };
        }
        if self.layout == SPLIT { call } else { call.attribute("kv_layout", Attr::I64(self.layout)) }
    }

    /// The caches after the update.
    pub fn expected(&self) -> Vec<Array> {
        let mut caches = self.caches();
        let slots = self.num_pages * self.page_size;
        for (kv, scale) in [&self.k_scale, &self.v_scale].into_iter().enumerate() {
            let cache = kv.min(caches.len() - 1);
            caches[cache] = kv_cache_update(
                &caches[cache],
                &self.rows()[kv],
                &self.slots,
                slots,
                scale.as_deref(),
                self.row_of(kv),
            );
        }
        caches
    }

    /// Both ways, in place and into a buffer of its own, give what is expected.
    pub fn check(&self) {
        for in_place in [true, false] {
            for_both_sides(|side| {
                let found = self.invocation(in_place).results(side);
                for (found, expected) in found.iter().zip(self.expected()) {
                    assert!(*found == expected, "{self:?}, in place: {in_place}: the cache differs");
                }
            });
        }
    }
}
