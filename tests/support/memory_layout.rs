//! How the numbers of a batch lie in the operands of a call, and what lies around them.

use super::{Array, AttentionConfig, BF16, Dtype, F8E4M3FN, F8E5M2, F16, F32, Numbers, Random, count};
use half::{bf16, f16};

/// How keys and values share buffers (`docs/semantics.md#kv-caches`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvLayout {
    /// k `[Tk, Hkv, D]`, v `[Tk, Hkv, Dv]`
    Contiguous,
    /// k `[P, page_size, Hkv, D]`, v `[P, page_size, Hkv, Dv]`
    Split,
    /// `[P, page_size, 2*Hkv, D]`, K of head h at 2h, V at 2h+1
    Interleaved,
    /// `[2, P, page_size, Hkv, D]`
    Stacked,
    /// `[P, 2, page_size, Hkv, D]`
    PerPage,
}

impl KvLayout {
    pub const PAGED: [Self; 4] = [Self::Split, Self::Interleaved, Self::Stacked, Self::PerPage];
    pub const ALL: [Self; 5] = [Self::Contiguous, Self::Split, Self::Interleaved, Self::Stacked, Self::PerPage];

    /// The attribute.
    pub fn kv_layout(self) -> i64 {
        match self {
            Self::Contiguous | Self::Split => 0,
            Self::Interleaved => 1,
            Self::Stacked => 2,
            Self::PerPage => 3,
        }
    }

    /// Keys and values lie in two buffers, so that their rows may differ in width.
    pub fn has_two_buffers(self) -> bool {
        self.kv_layout() == 0
    }
}

/// The element at which a row of K or V begins: (buffer, index). A contiguous buffer is pages of one token.
#[derive(Clone, Copy, Debug)]
pub struct KvGeometry {
    pub layout: KvLayout,
    /// P, or Tk
    pub num_pages: usize,
    pub page_size: usize,
    pub kv_heads: usize,
    /// D, Dv
    pub dims: [usize; 2],
}

impl KvGeometry {
    /// `value` is 0 for K, 1 for V.
    pub fn of(&self, value: usize, page: usize, token: usize, head: usize) -> (usize, usize) {
        let Self { layout, num_pages, page_size, kv_heads, dims } = *self;
        let d = dims[value];
        match layout {
            KvLayout::Contiguous | KvLayout::Split => (value, ((page * page_size + token) * kv_heads + head) * d),
            KvLayout::Interleaved => (0, ((page * page_size + token) * 2 * kv_heads + 2 * head + value) * d),
            KvLayout::Stacked => (0, (((value * num_pages + page) * page_size + token) * kv_heads + head) * d),
            KvLayout::PerPage => (0, (((page * 2 + value) * page_size + token) * kv_heads + head) * d),
        }
    }

    /// The same for a slot, `page * page_size + token`.
    pub fn of_slot(&self, value: usize, slot: usize, head: usize) -> (usize, usize) {
        self.of(value, slot / self.page_size, slot % self.page_size, head)
    }

    /// The slot of this number, if there is one.
    pub fn slot(&self, number: i64) -> Option<usize> {
        usize::try_from(number).ok().filter(|&slot| slot < self.num_pages * self.page_size)
    }

    /// The buffers' shapes.
    pub fn shapes(&self) -> Vec<Vec<i64>> {
        let [pages, tokens, heads] = [self.num_pages, self.page_size, self.kv_heads].map(|x| x as i64);
        let [d, dv] = self.dims.map(|x| x as i64);
        match self.layout {
            KvLayout::Contiguous => vec![vec![pages, heads, d], vec![pages, heads, dv]],
            KvLayout::Split => vec![vec![pages, tokens, heads, d], vec![pages, tokens, heads, dv]],
            KvLayout::Interleaved => vec![vec![pages, tokens, 2 * heads, d]],
            KvLayout::Stacked => vec![vec![2, pages, tokens, heads, d]],
            KvLayout::PerPage => vec![vec![pages, 2, tokens, heads, d]],
        }
    }
}

/// What a call tells of its longest sequences.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MaxSeqlenHints {
    /// 0
    Unknown,
    /// The next power of two, as front-ends pass it.
    RoundedUp,
    /// Far too small.
    TooSmall,
    /// The largest number there is.
    Huge,
}

with_defaults! {
    /// Where the numbers lie and what lies around them.
    #[derive(Clone, Debug)]
    pub struct MemoryLayout {
        pub layout: KvLayout = KvLayout::Interleaved,
        /// Of a paged layout.
        pub page_size: usize = 16,
        /// Query rows before the first sequence and after the last.
        pub rows_around: (usize, usize) = (0, 2),
        /// Sequences' rows are followed by rows which they do not use.
        pub seqused_q: bool = false,
        /// The numbers of keys are given by themselves; contiguous keys are then followed by unused ones.
        pub seqused_k: bool = true,
        /// Slots of the metadata without a sequence.
        pub spare_seqs: usize = 2,
        /// Entries of a table beyond the longest sequence's pages.
        pub spare_entries: usize = 3,
        /// Pages, or rows of contiguous keys, of no sequence.
        pub spare_pages: usize = 3,
        pub hints: MaxSeqlenHints = MaxSeqlenHints::Unknown,
        /// `paged_attention` is asked for `softmax_lse`, which `flash_attn_varlen` always gives.
        pub lse: bool = true,
        /// Bytes, if there is one.
        pub workspace: Option<usize> = Some(1000),
        /// Decides the order of the pages and the poison.
        pub seed: u64 = 1,
    }
}

impl MemoryLayout {
    /// Packed rows whose starts say everything.
    pub fn contiguous() -> Self {
        Self { layout: KvLayout::Contiguous, seqused_k: false, ..Self::default() }
    }

    /// Pages of a layout.
    pub fn paged(layout: KvLayout, page_size: usize) -> Self {
        Self { layout, page_size, ..Self::default() }
    }

    /// Nothing but the sequences.
    pub fn bare(self) -> Self {
        Self { rows_around: (0, 0), spare_seqs: 0, spare_entries: 0, spare_pages: 0, ..self }
    }

    pub fn is_paged(&self) -> bool {
        self.layout != KvLayout::Contiguous
    }

    pub(super) fn kv_geometry(&self, config: &AttentionConfig, num_pages: usize) -> KvGeometry {
        KvGeometry {
            layout: self.layout,
            num_pages,
            page_size: if self.is_paged() { self.page_size } else { 1 },
            kv_heads: config.kv_heads,
            dims: [config.head_dim, config.value_dim],
        }
    }
}

/// Bit patterns, low byte first, of numbers that must have no effect.
fn poisons(dtype: Dtype) -> &'static [&'static [u8]] {
    match dtype {
        F32 => &[&[0, 0, 0xc0, 0x7f], &[0xff; 4], &[1, 0, 0x80, 0x7f], &[0, 0, 0x80, 0x7f], &[0, 0, 0x80, 0xff]],
        F16 => &[&[0, 0x7e], &[0xff; 2], &[1, 0x7c], &[0, 0x7c], &[0, 0xfc]],
        BF16 => &[&[0xc0, 0x7f], &[0xff; 2], &[0x81, 0x7f], &[0x80, 0x7f], &[0x80, 0xff]],
        F8E5M2 => &[&[0x7e], &[0xff], &[0x7d], &[0x7c], &[0xfc]],
        F8E4M3FN => &[&[0x7f], &[0xff]],
        _ => panic!("{dtype:?} is no type of attention"),
    }
}

/// An array of NaN and, where the type has them, infinities.
pub fn poisoned(random: &mut Random, dtype: Dtype, dims: &[i64]) -> Array {
    let patterns = poisons(dtype);
    let bytes = (0..count(dims)).flat_map(|_| random.one_of(patterns).iter().copied()).collect();
    Array { dtype, dims: dims.to_vec(), bytes }
}

/// Write `values` from element `at` on.
pub fn put(array: &mut Array, at: usize, values: &[f64]) {
    let size = array.dtype.size();
    let places = array.bytes[at * size..].chunks_exact_mut(size).zip(values);
    // The common types without a vector for each number.
    match array.dtype {
        F32 => places.for_each(|(to, x)| to.copy_from_slice(&(*x as f32).to_ne_bytes())),
        F16 => places.for_each(|(to, x)| to.copy_from_slice(&f16::from_f64(*x).to_ne_bytes())),
        BF16 => places.for_each(|(to, x)| to.copy_from_slice(&bf16::from_f64(*x).to_ne_bytes())),
        dtype => places.for_each(|(to, x)| to.copy_from_slice(&dtype.encode(*x))),
    }
}
