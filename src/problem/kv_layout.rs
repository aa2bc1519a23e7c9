//! Layouts of a paged K/V cache. Every layout reduces to an address and three strides for K, and the same for V.

use crate::tensor::{Dim, Tensor};

/// K or V of a paged cache. Row `(page, token, head)` starts at
/// `data + (page * page_stride + token * token_stride + head * head_stride) * element size`, and its elements are
/// contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvView {
    /// Row (0, 0, 0).
    pub data: *mut u8,
    /// Stride of the pages in elements.
    pub page_stride: i64,
    /// Stride of the tokens of a page in elements.
    pub token_stride: i64,
    /// Stride of the KV heads in elements.
    pub head_stride: i64,
}

// SAFETY: the struct consists of an address and numbers; each access through it states why it is allowed (see
// `Tensor`).
unsafe impl Send for KvView {}
// SAFETY: as for `Send`.
unsafe impl Sync for KvView {}

/// The layout of a buffer that holds K and V: the attribute `kv_layout` (`docs/semantics.md#kv-caches`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvLayout {
    /// 1: `[P, page_size, 2*Hkv, D]`, K of head h at 2h, V at 2h+1
    Interleaved,
    /// 2: `[2, P, page_size, Hkv, D]`, K first
    Stacked,
    /// 3: `[P, 2, page_size, Hkv, D]`, K first in each page
    PerPage,
}

impl KvLayout {
    pub(crate) fn from_number(number: i64) -> Option<Self> {
        match number {
            1 => Some(Self::Interleaved),
            2 => Some(Self::Stacked),
            3 => Some(Self::PerPage),
            _ => None,
        }
    }

    /// The expected shape of a cache. `heads` is Hkv if another operand determines it, `head_dim` is D.
    pub(crate) fn shape(self, heads: Dim, head_dim: i64) -> Vec<Dim> {
        let (pages, page_size) = (Dim::Any("num_pages"), Dim::Any("page_size"));
        let (two, d) = (Dim::Is("K and V", 2), Dim::Is("D", head_dim));
        let both = match heads {
            Dim::Any(_) => Dim::Any("2*Hkv"),
            Dim::Is(_, heads) => Dim::Is("2*Hkv", heads.saturating_mul(2)),
        };
        match self {
            Self::Interleaved => vec![pages, page_size, both, d],
            Self::Stacked => vec![two, pages, page_size, heads, d],
            Self::PerPage => vec![pages, two, page_size, heads, d],
        }
    }

    /// Hkv of a cache; `None` for an interleaved cache with an odd number of heads.
    pub(crate) fn kv_heads(self, cache: &Tensor) -> Option<i64> {
        let heads = cache.dims[self.axes().1 + 1];
        match self {
            Self::Interleaved => (heads % 2 == 0).then_some(heads / 2),
            Self::Stacked | Self::PerPage => Some(heads),
        }
    }

    /// The axes of pages and of tokens.
    pub(crate) fn axes(self) -> (usize, usize) {
        match self {
            Self::Interleaved => (0, 1),
            Self::Stacked => (1, 2),
            Self::PerPage => (0, 2),
        }
    }

    /// K and V of `cache`, whose shape is [`KvLayout::shape`].
    pub(crate) fn views(self, cache: &Tensor) -> (KvView, KvView) {
        let (pages, tokens) = self.axes();
        let heads = tokens + 1;
        // Distances in elements from K to V of the same row, and from one KV head to the next.
        let (to_v, head_stride) = match self {
            Self::Interleaved => (cache.stride(heads), 2 * cache.stride(heads)),
            Self::Stacked => (cache.stride(0), cache.stride(heads)),
            Self::PerPage => (cache.stride(1), cache.stride(heads)),
        };
        let k = KvView {
            data: cache.data,
            page_stride: cache.stride(pages),
            token_stride: cache.stride(tokens),
            head_stride,
        };
        (k, KvView { data: cache.data.wrapping_offset(to_v as isize * cache.dtype.size() as isize), ..k })
    }
}

impl KvView {
    /// The view of packed K or V, `[Tk, Hkv, D]`.
    pub(crate) fn packed(rows: &Tensor) -> Self {
        Self { data: rows.data, page_stride: 0, token_stride: rows.stride(0), head_stride: rows.stride(1) }
    }

    /// The view of a cache `[P, page_size, Hkv, D]` that holds only K or only V.
    pub(crate) fn alone(cache: &Tensor) -> Self {
        Self {
            data: cache.data,
            page_stride: cache.stride(0),
            token_stride: cache.stride(1),
            head_stride: cache.stride(2),
        }
    }
}
