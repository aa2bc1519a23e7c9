//! Calls of the cache updates in every layout, what they leave in the caches, and how both compare.

use super::array::{ATTENTION_DTYPES, Array, Dtype, F8E4M3FN, F8E5M2, F32, count};
use super::case::{slot_mapping, with_scales};
use super::guard::for_both_sides;
use super::invocation::{Attr, Invocation};
use super::oracle::kv_cache_update;
use super::random::Random;
use super::storage::{Layout, Place};

/// A call in numbers.
#[derive(Clone, Debug)]
pub struct Update {
    /// [`Layout::Split`] has another target.
    pub layout: Layout,
    /// Of keys and values.
    pub dtype: Dtype,
    /// Of the caches, if it is another.
    pub fp8: Option<Dtype>,
    pub num_pages: usize,
    pub page_size: usize,
    pub heads: usize,
    /// D, Dv: one number unless the layout has two buffers.
    pub dims: [usize; 2],
    pub slots: Vec<i64>,
    pub wide_slots: bool,
    /// Of keys, of values.
    pub scales: [Option<Vec<f32>>; 2],
    pub seed: u64,
}

impl Default for Update {
    fn default() -> Self {
        Self {
            layout: Layout::Interleaved,
            dtype: F32,
            fp8: None,
            num_pages: 3,
            page_size: 4,
            heads: 2,
            dims: [16, 16],
            slots: vec![7, 0, 11, 4],
            wide_slots: false,
            scales: [None, None],
            seed: 1,
        }
    }
}

/// Of any element, as sizes.
pub fn dims_of(dims: &[usize]) -> Vec<i64> {
    dims.iter().map(|&d| d as i64).collect()
}

/// Any bit pattern: copying keeps even the payload of a NaN.
pub fn any_bits(dtype: Dtype, dims: &[i64], seed: u64) -> Array {
    let mut random = Random::new(seed);
    let bytes = (0..count(dims) * dtype.size()).map(|_| random.next() as u8).collect();
    Array { dtype, dims: dims.to_vec(), bytes }
}

pub fn numbers(dtype: Dtype, dims: &[i64], seed: u64) -> Array {
    let mut random = Random::new(seed);
    let values: Vec<f64> = (0..count(dims)).map(|_| 10.0 * random.normal()).collect();
    Array::new(dtype, dims, &values)
}

impl Update {
    /// One call for each of these layouts, each type of rows and of caches, and scales that are none, one or one a head.
    pub fn each_type(layouts: &[Layout]) -> Vec<Self> {
        let scales = [None, Some(vec![0.37]), Some(vec![3.0, 0.011])];
        let mut all = vec![];
        for (&layout, dtype) in layouts.iter().flat_map(|layout| ATTENTION_DTYPES.map(|dtype| (layout, dtype))) {
            for fp8 in [None, Some(F8E4M3FN), Some(F8E5M2)] {
                for (k_scale, v_scale) in scales.iter().flat_map(|k| scales.iter().map(move |v| (k, v))) {
                    let scales = [k_scale.clone(), v_scale.clone()];
                    all.push(Self { layout, dtype, fp8, scales, ..Self::default() });
                }
            }
        }
        all
    }

    pub fn cache_dtype(&self) -> Dtype {
        self.fp8.unwrap_or(self.dtype)
    }

    pub fn place(&self) -> Place {
        let Self { layout, num_pages, page_size, heads, dims, .. } = *self;
        Place { layout, num_pages, page_size, kv_heads: heads, dims }
    }

    /// One cache, or K's and V's, full of anything.
    pub fn caches(&self) -> Vec<Array> {
        caches(&self.place(), self.cache_dtype(), self.seed)
    }

    /// Whether rows are copied bit by bit.
    pub fn copies(&self) -> bool {
        self.fp8.is_none() && self.scales.iter().all(Option::is_none)
    }

    /// Keys and values: of any bits where these are copied.
    pub fn rows(&self) -> [Array; 2] {
        let make = if self.copies() { any_bits } else { numbers };
        [0, 1].map(|value| {
            let dims = dims_of(&[self.slots.len(), self.heads, self.dims[value]]);
            make(self.dtype, &dims, self.seed + 300 + 100 * value as u64)
        })
    }

    /// `[T]`, of 32 bits or 64.
    pub fn slot_mapping(&self) -> Array {
        slot_mapping(&self.slots, self.wide_slots)
    }

    /// The call, each result in its operand's memory or in its own.
    pub fn invocation(&self, in_place: bool) -> Invocation {
        let split = self.layout == Layout::Split;
        let names: &[&'static str] = if split { &["k_cache", "v_cache"] } else { &["kv_cache"] };
        let mut call = Invocation::new(if split { "xla_gpu_kv_cache_update_split" } else { "xla_gpu_kv_cache_update" });
        call.what = format!("{self:?}, in place: {in_place}");
        call.operands.extend(names.iter().copied().zip(self.caches()));
        let [key, value] = self.rows();
        call = call.operand("key", key).operand("value", value).operand("slot_mapping", self.slot_mapping());
        call = with_scales(call, &self.scales);
        for (index, name) in names.iter().enumerate() {
            call = call.updated(name, index, in_place);
        }
        if split { call } else { call.attribute("kv_layout", Attr::I64(self.layout.kv_layout())) }
    }

    /// The caches after the update.
    pub fn expected(&self) -> Vec<Array> {
        kv_cache_update(&self.caches(), &self.place(), &self.rows(), &self.slots, &self.scales)
    }

    /// Both ways, in place and into a buffer of its own, give what is expected.
    pub fn check(&self) {
        for in_place in [true, false] {
            for_both_sides(|side| {
                let found = self.invocation(in_place).results(side);
                assert!(found == self.expected(), "{self:?}, in place: {in_place}: the cache differs");
            });
        }
    }
}

/// The buffers of a cache, full of anything.
pub fn caches(place: &Place, dtype: Dtype, seed: u64) -> Vec<Array> {
    place.shapes().iter().zip(seed + 100..).map(|(dims, seed)| any_bits(dtype, dims, seed)).collect()
}
