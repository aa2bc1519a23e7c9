//! How the numbers of a batch lie in the operands of a call, and what surrounds them.

use super::{Array, AttentionConfig, BF16, Dtype, F8E4M3FN, F8E5M2, F16, F32, I8, Numbers, Random, count};
use half::{bf16, f16};

/// Layouts of keys and values (`docs/semantics.md#kv-caches`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvLayout {
    /// k `[Tk, Hkv, D]`, v `[Tk, Hkv, Dv]`.
    Contiguous,
    /// k `[P, page_size, Hkv, D]`, v `[P, page_size, Hkv, Dv]`.
    Split,
    /// `[P, page_size, 2*Hkv, D]`: K of head h is at 2h, V at 2h+1.
    Interleaved,
    /// `[2, P, page_size, Hkv, D]`.
    Stacked,
    /// `[P, 2, page_size, Hkv, D]`.
    PerPage,
    /// `[P, page_size, D]`: latent rows, which are K and in their first Dv columns V.
    Latent,
}

impl KvLayout {
    pub const PAGED: [Self; 4] = [Self::Split, Self::Interleaved, Self::Stacked, Self::PerPage];
    pub const ALL: [Self; 5] = [Self::Contiguous, Self::Split, Self::Interleaved, Self::Stacked, Self::PerPage];

    /// The value of the attribute `kv_layout`.
    pub fn kv_layout(self) -> i64 {
        match self {
            Self::Contiguous | Self::Split | Self::Latent => 0,
            Self::Interleaved => 1,
            Self::Stacked => 2,
            Self::PerPage => 3,
        }
    }

    /// Whether K and V have separate buffers, so that Dv may differ from D.
    pub fn has_two_buffers(self) -> bool {
        [Self::Contiguous, Self::Split].contains(&self)
    }
}

/// Sizes of the buffers of keys and values. Contiguous keys count as pages of one token.
#[derive(Clone, Copy, Debug)]
pub struct KvGeometry {
    pub layout: KvLayout,
    /// P, or Tk of contiguous keys.
    pub num_pages: usize,
    pub page_size: usize,
    pub kv_heads: usize,
    /// D and Dv.
    pub dims: [usize; 2],
}

impl KvGeometry {
    /// (buffer, element) at which a row of K (`value` 0) or V (1) begins.
    pub fn element(&self, value: usize, page: usize, token: usize, head: usize) -> (usize, usize) {
        let Self { layout, num_pages, page_size, kv_heads, dims } = *self;
        let d = dims[value];
        match layout {
            KvLayout::Contiguous | KvLayout::Split => (value, ((page * page_size + token) * kv_heads + head) * d),
            KvLayout::Interleaved => (0, ((page * page_size + token) * 2 * kv_heads + 2 * head + value) * d),
            KvLayout::Stacked => (0, (((value * num_pages + page) * page_size + token) * kv_heads + head) * d),
            KvLayout::PerPage => (0, (((page * 2 + value) * page_size + token) * kv_heads + head) * d),
            KvLayout::Latent => (0, (page * page_size + token) * dims[0]),
        }
    }

    /// The same for a slot, which is `page * page_size + token`.
    pub fn slot_element(&self, value: usize, slot: usize, head: usize) -> (usize, usize) {
        self.element(value, slot / self.page_size, slot % self.page_size, head)
    }

    /// `number` as a slot; `None` if the cache has no such slot.
    pub fn valid_slot(&self, number: i64) -> Option<usize> {
        usize::try_from(number).ok().filter(|&slot| slot < self.num_pages * self.page_size)
    }

    /// The shapes of the buffers.
    pub fn shapes(&self) -> Vec<Vec<i64>> {
        let [pages, tokens, heads] = [self.num_pages, self.page_size, self.kv_heads].map(|x| x as i64);
        let [d, dv] = self.dims.map(|x| x as i64);
        match self.layout {
            KvLayout::Contiguous => vec![vec![pages, heads, d], vec![pages, heads, dv]],
            KvLayout::Split => vec![vec![pages, tokens, heads, d], vec![pages, tokens, heads, dv]],
            KvLayout::Interleaved => vec![vec![pages, tokens, 2 * heads, d]],
            KvLayout::Stacked => vec![vec![2, pages, tokens, heads, d]],
            KvLayout::PerPage => vec![vec![pages, 2, tokens, heads, d]],
            KvLayout::Latent => vec![vec![pages, tokens, d]],
        }
    }
}

/// The values of `max_seqlen_q` and `max_seqlen_k`, relative to the longest sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MaxSeqlenHints {
    /// 0, which means unknown.
    Unknown,
    /// The next power of two, as front-ends pass it.
    RoundedUp,
    /// 1.
    TooSmall,
    /// `i64::MAX`.
    Huge,
}

with_defaults! {
    /// How the numbers of a batch lie in memory, and what surrounds them.
    #[derive(Clone, Debug)]
    pub struct MemoryLayout {
        pub layout: KvLayout = KvLayout::Interleaved,
        /// Tokens per page of a paged layout.
        pub page_size: usize = 16,
        /// Query rows before the first sequence and after the last.
        pub rows_around: (usize, usize) = (0, 2),
        /// Whether `seqused_q` is given; sequences then have further rows that they do not use.
        pub seqused_q: bool = false,
        /// Whether `seqused_k` is given; contiguous keys of a sequence are then followed by unused ones.
        pub seqused_k: bool = true,
        /// Slots of the metadata without a sequence.
        pub spare_seqs: usize = 2,
        /// Entries of a block table row beyond the pages of the longest sequence.
        pub spare_entries: usize = 3,
        /// Pages, or rows of contiguous keys, that belong to no sequence.
        pub spare_pages: usize = 3,
        pub hints: MaxSeqlenHints = MaxSeqlenHints::Unknown,
        /// Whether `paged_attention` returns `softmax_lse`; `flash_attn_varlen` always does.
        pub lse: bool = true,
        /// Bytes of the workspace; `None` without one.
        pub workspace: Option<usize> = Some(1000),
        /// Determines the order of the pages, and the contents of everything that belongs to no sequence.
        pub seed: u64 = 1,
    }
}

impl MemoryLayout {
    /// Packed keys whose starts give all lengths.
    pub fn contiguous() -> Self {
        Self { layout: KvLayout::Contiguous, seqused_k: false, ..Self::default() }
    }

    /// A paged layout.
    pub fn paged(layout: KvLayout, page_size: usize) -> Self {
        Self { layout, page_size, ..Self::default() }
    }

    /// The same with nothing but the sequences: no further rows, slots, entries or pages.
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

/// Bit patterns of NaN and infinities, low byte first.
fn poisons(dtype: Dtype) -> &'static [&'static [u8]] {
    match dtype {
        F32 => &[&[0, 0, 0xc0, 0x7f], &[0xff; 4], &[1, 0, 0x80, 0x7f], &[0, 0, 0x80, 0x7f], &[0, 0, 0x80, 0xff]],
        F16 => &[&[0, 0x7e], &[0xff; 2], &[1, 0x7c], &[0, 0x7c], &[0, 0xfc]],
        BF16 => &[&[0xc0, 0x7f], &[0xff; 2], &[0x81, 0x7f], &[0x80, 0x7f], &[0x80, 0xff]],
        F8E5M2 => &[&[0x7e], &[0xff], &[0x7d], &[0x7c], &[0xfc]],
        F8E4M3FN => &[&[0x7f], &[0xff]],
        // No NaN: the scales of rows hold it.
        I8 => &[&[0x80], &[0x7f], &[0x81], &[0], &[0x55]],
        _ => panic!("{dtype:?} is no type of attention"),
    }
}

/// An array of NaN and, where the dtype has them, infinities.
pub fn poisoned(random: &mut Random, dtype: Dtype, dims: &[i64]) -> Array {
    let patterns = poisons(dtype);
    let bytes = (0..count(dims)).flat_map(|_| random.one_of(patterns).iter().copied()).collect();
    Array { dtype, dims: dims.to_vec(), bytes }
}

/// Writes `values` from element `at` on.
pub fn put(array: &mut Array, at: usize, values: &[f64]) {
    let size = array.dtype.size();
    let places = array.bytes[at * size..].chunks_exact_mut(size).zip(values);
    // The common dtypes do not need an allocation per element.
    match array.dtype {
        F32 => places.for_each(|(to, x)| to.copy_from_slice(&(*x as f32).to_ne_bytes())),
        F16 => places.for_each(|(to, x)| to.copy_from_slice(&f16::from_f64(*x).to_ne_bytes())),
        BF16 => places.for_each(|(to, x)| to.copy_from_slice(&bf16::from_f64(*x).to_ne_bytes())),
        dtype => places.for_each(|(to, x)| to.copy_from_slice(&dtype.encode(*x))),
    }
}
