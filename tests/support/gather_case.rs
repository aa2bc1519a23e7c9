//! Calls of `gather_kv_cache`, and the results that they must have.

use super::{
    Array, Attr, Dtype, F32, I32, Invocation, KvGeometry, KvLayout, Numbers, Random, caches, count, dims_of, f32s,
    for_each_side, i32s,
};
use xla_attention::Op;

with_defaults! {
    /// A gather in numbers.
    #[derive(Clone, Debug)]
    pub struct GatherCase {
        pub layout: KvLayout = KvLayout::Interleaved,
        /// Dtype of the cache.
        pub dtype: Dtype = F32,
        /// Dtype of the gathered keys and values.
        pub out: Dtype = F32,
        pub num_pages: usize = 5,
        pub page_size: usize = 4,
        pub heads: usize = 2,
        /// D and Dv, which differ only where K and V have separate buffers.
        pub dims: [usize; 2] = [16, 16],
        /// M.
        pub max_pages: usize = 3,
        /// Block tables, `[S, M]`.
        pub tables: Vec<i32> = vec![3, 1, 4, 0, 2, 2, 4, 4, 0],
        pub lens: Vec<i32> = vec![9, 0, 6],
        /// N, the rows of the results.
        pub capacity: usize = 17,
        /// `k_scale` and `v_scale`.
        pub scales: [Option<Vec<f32>>; 2] = [None, None],
        /// Whether the rows of the cache have scales.
        pub scaled: bool = false,
        pub seed: u64 = 1,
    }
}

impl GatherCase {
    fn kv_geometry(&self) -> KvGeometry {
        let Self { layout, num_pages, page_size, heads, dims, .. } = *self;
        KvGeometry { layout, num_pages, page_size, kv_heads: heads, dims }
    }

    /// The cache, or the caches of keys and of values, with random contents.
    pub fn caches(&self) -> Vec<Array> {
        caches(&self.kv_geometry(), self.dtype, self.seed)
    }

    /// The scales of the rows, a few of which are NaN.
    fn scale_cache(&self) -> Array {
        let mut random = Random::new(self.seed + 800);
        let dims = self.kv_geometry().scale_dims();
        let scale = |random: &mut Random| if random.chance(5) { f64::NAN } else { random.normal() };
        Array::new(F32, &dims, &(0..count(&dims)).map(|_| scale(&mut random)).collect::<Vec<_>>())
    }

    fn result_dims(&self) -> [Vec<i64>; 2] {
        self.dims.map(|d| dims_of(&[self.capacity, self.heads, d]))
    }

    pub fn invocation(&self) -> Invocation {
        self.of_caches(self.caches())
    }

    /// The call with other caches.
    pub fn of_caches(&self, mut caches: Vec<Array>) -> Invocation {
        let v_cache = if caches.len() == 2 { caches.remove(1) } else { Array::left_out(self.dtype) };
        let seqs = self.lens.len() as i64;
        let operand = |name: &str| match name {
            "k_cache" => Some(caches[0].clone()),
            "v_cache" => Some(v_cache.clone()),
            "block_tables" => Some(Array::i32s(&[seqs, self.max_pages as i64], &self.tables)),
            "context_lens" => Some(i32s(&self.lens)),
            "k_scale" => f32s(self.scales[0].as_ref()),
            "kv_scale_cache" => self.scaled.then(|| self.scale_cache()),
            _ => f32s(self.scales[1].as_ref()),
        };
        let call = Invocation::of(Op::GatherKvCache, operand, |_| Attr::I64(self.layout.kv_layout()));
        let [keys, values] = self.result_dims();
        let call = call.result("keys", self.out, &keys).result("values", self.out, &values);
        Invocation { description: format!("{self:?}"), ..call.result("cu_seqlens", I32, &[seqs + 1]) }
    }

    /// (page, token in the page) of each row that is gathered, and `cu_seqlens`.
    fn rows(&self) -> (Vec<(usize, usize)>, Vec<i32>) {
        let longest = if self.num_pages == 0 { 0 } else { self.max_pages * self.page_size };
        let (mut rows, mut starts) = (vec![], vec![0]);
        for (b, &len) in self.lens.iter().enumerate() {
            let len = usize::try_from(len).unwrap_or(0).min(longest);
            for token in 0..len.min(self.capacity - rows.len()) {
                let page = self.tables[b * self.max_pages + token / self.page_size];
                rows.push((page.clamp(0, self.num_pages as i32 - 1) as usize, token % self.page_size));
            }
            starts.push(rows.len() as i32);
        }
        (rows, starts)
    }

    /// Keys, values and `cu_seqlens`.
    pub fn expected(&self) -> [Array; 3] {
        let caches = self.caches();
        let row_scales = if self.scaled { self.scale_cache().values() } else { vec![] };
        let (rows, starts) = self.rows();
        let (kv_geometry, size) = (self.kv_geometry(), self.dtype.size());
        let [keys, values] = [0, 1].map(|value| {
            let mut result = Array::filled(self.out, &self.result_dims()[value], 0);
            let width = self.dims[value];
            for (row, head) in (0..rows.len()).flat_map(|row| (0..self.heads).map(move |head| (row, head))) {
                let (buffer, at) = kv_geometry.element(value, rows[row].0, rows[row].1, head);
                let from = &caches[buffer].bytes[at * size..][..width * size];
                let to = &mut result.bytes[(row * self.heads + head) * width * self.out.size()..];
                if self.out == self.dtype && self.scales[value].is_none() {
                    to[..from.len()].copy_from_slice(from);
                    continue;
                }
                let row_scale = row_scales.get(at / width).copied();
                let factor = self.scales[value].as_ref().map_or(1.0, |s| s[if s.len() == 1 { 0 } else { head }]);
                let factor = row_scale.map_or(factor, |scale| scale as f32);
                for (from, to) in from.chunks_exact(size).zip(to.chunks_exact_mut(self.out.size())) {
                    let product = self.dtype.decode(from) as f32 * factor;
                    to.copy_from_slice(&self.out.encode(f64::from(product)));
                }
            }
            result
        });
        [keys, values, Array::i32s(&[starts.len() as i64], &starts)]
    }

    /// Asserts that the call has the expected results.
    pub fn assert_matches_reference(&self) {
        for_each_side(|side| self.assert_results(&self.invocation().results(side)));
    }

    /// Asserts that these are the expected results. A computed NaN may be any NaN.
    pub fn assert_results(&self, actual: &[Array]) {
        for ((actual, expected), name) in actual.iter().zip(&self.expected()).zip(["keys", "values", "cu_seqlens"]) {
            assert_eq!((actual.dtype, &actual.dims), (expected.dtype, &expected.dims), "{self:?}: {name}");
            let element = first_difference(actual, expected);
            assert!(element.is_none(), "{self:?}: {name} differ in {element:02x?}");
        }
    }
}

/// Index, bytes and expected bytes of the first element that differs. All NaN count as equal.
fn first_difference<'a>(actual: &'a Array, expected: &'a Array) -> Option<(usize, &'a [u8], &'a [u8])> {
    let (dtype, size) = (actual.dtype, actual.dtype.size());
    let is_nan = |bytes: &[u8]| dtype != I32 && dtype.decode(bytes).is_nan();
    let elements = actual.bytes.chunks_exact(size).zip(expected.bytes.chunks_exact(size)).enumerate();
    let mut different = elements.filter(|(_, (a, b))| a != b && !(is_nan(a) && is_nan(b)));
    different.next().map(|(index, (a, b))| (index, a, b))
}
