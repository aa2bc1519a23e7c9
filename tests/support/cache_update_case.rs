//! Calls of `kv_cache_update` and `kv_cache_update_split`, and the caches that they must leave.

use super::{
    ATTENTION_DTYPES, Array, Attr, Dtype, F8E4M3FN, F8E5M2, F32, Invocation, KvGeometry, KvLayout, Random, count, f32s,
    for_each_side, kv_cache_update, quantized_cache_update, slot_mapping,
};
use xla_attention::Op;

with_defaults! {
    /// A cache update in numbers.
    #[derive(Clone, Debug)]
    pub struct CacheUpdateCase {
        /// [`KvLayout::Split`] selects `kv_cache_update_split`.
        pub layout: KvLayout = KvLayout::Interleaved,
        /// Dtype of the new keys and values.
        pub dtype: Dtype = F32,
        /// Dtype of the caches, if they are quantized.
        pub fp8: Option<Dtype> = None,
        /// Whether the rows of the cache, of i8 or f8e4m3fn, have scales.
        pub scaled: bool = false,
        pub num_pages: usize = 3,
        pub page_size: usize = 4,
        pub heads: usize = 2,
        /// D and Dv, which differ only where K and V have separate buffers.
        pub dims: [usize; 2] = [16, 16],
        pub slots: Vec<i64> = vec![7, 0, 11, 4],
        pub wide_slots: bool = false,
        /// `k_scale` and `v_scale`.
        pub scales: [Option<Vec<f32>>; 2] = [None, None],
        pub seed: u64 = 1,
    }
}

/// Sizes as dimensions of an array.
pub fn dims_of(dims: &[usize]) -> Vec<i64> {
    dims.iter().map(|&d| d as i64).collect()
}

/// Random bits. A copy must keep even the payload of a NaN.
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

impl CacheUpdateCase {
    /// One call for each of these layouts, each dtype of rows and of caches, and each combination of no scale, one
    /// scale and one scale per head for keys and values.
    pub fn each_type(layouts: &[KvLayout]) -> Vec<Self> {
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

    pub fn kv_geometry(&self) -> KvGeometry {
        let Self { layout, num_pages, page_size, heads, dims, .. } = *self;
        KvGeometry { layout, num_pages, page_size, kv_heads: heads, dims }
    }

    /// The cache, or the caches of keys and of values, with random contents.
    pub fn caches(&self) -> Vec<Array> {
        caches(&self.kv_geometry(), self.cache_dtype(), self.seed)
    }

    /// Whether the update copies the rows bit by bit.
    pub fn copies(&self) -> bool {
        self.fp8.is_none() && self.scales.iter().all(Option::is_none)
    }

    /// The new keys and values: random bits if they are copied, random numbers otherwise.
    pub fn rows(&self) -> [Array; 2] {
        let make = if self.copies() { any_bits } else { numbers };
        [0, 1].map(|value| {
            let dims = dims_of(&[self.slots.len(), self.heads, self.dims[value]]);
            make(self.dtype, &dims, self.seed + 300 + 100 * value as u64)
        })
    }

    /// The call. Each result shares its operand's memory if `in_place`.
    pub fn invocation(&self, in_place: bool) -> Invocation {
        let split = self.layout == KvLayout::Split;
        let op = if split { Op::KvCacheUpdateSplit } else { Op::KvCacheUpdate };
        let operand = |name: &str| self.operand(name);
        let mut call = Invocation::of(op, operand, |_| Attr::I64(self.layout.kv_layout()));
        call.description = format!("{self:?}, in place: {in_place}");
        let caches = if split { &["k_cache", "v_cache"][..] } else { &["kv_cache"] };
        let call = caches.iter().enumerate().fold(call, |call, (index, name)| call.updated(name, index, in_place));
        if self.scaled { call.updated_by_name("kv_scale_cache", in_place) } else { call }
    }

    /// The operand of this name; `None` if the case leaves it out.
    pub(super) fn operand(&self, name: &str) -> Option<Array> {
        match name {
            "kv_cache" | "k_cache" => Some(self.caches().remove(0)),
            "v_cache" => self.caches().pop(),
            "key" => Some(self.rows()[0].clone()),
            "value" => Some(self.rows()[1].clone()),
            "slot_mapping" => Some(slot_mapping(&self.slots, self.wide_slots)),
            "k_scale" => f32s(self.scales[0].as_ref()),
            "v_scale" => f32s(self.scales[1].as_ref()),
            "kv_scale_cache" => self.scaled.then(|| self.scale_cache()),
            _ => panic!("no operand of an update is called {name}"),
        }
    }

    /// The scales before the update, with random bits.
    pub fn scale_cache(&self) -> Array {
        any_bits(F32, &self.kv_geometry().scale_dims(), self.seed + 900)
    }

    /// The caches after the update, and the scales if the rows have them.
    pub fn expected(&self) -> Vec<Array> {
        self.expected_of(&self.rows())
    }

    /// The same of other rows.
    pub fn expected_of(&self, rows: &[Array; 2]) -> Vec<Array> {
        if self.scaled {
            let before = (&self.caches()[0], &self.scale_cache());
            return quantized_cache_update(before, &self.kv_geometry(), rows, &self.slots).to_vec();
        }
        kv_cache_update(&self.caches(), &self.kv_geometry(), rows, &self.slots, &self.scales)
    }

    /// Asserts that the update leaves the expected caches, in place and into separate results.
    pub fn assert_matches_reference(&self) {
        for in_place in [true, false] {
            for_each_side(|side| {
                let actual = self.invocation(in_place).results(side);
                assert!(actual == self.expected(), "{self:?}, in place: {in_place}: the cache differs");
            });
        }
    }
}

/// The buffers of a cache with random contents.
pub fn caches(kv_geometry: &KvGeometry, dtype: Dtype, seed: u64) -> Vec<Array> {
    kv_geometry.shapes().iter().zip(seed + 100..).map(|(dims, seed)| any_bits(dtype, dims, seed)).collect()
}
