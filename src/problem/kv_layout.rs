//! Where the K or V rows of a paged cache lie. A layout is a base address and three distances, whatever its name.

use crate::tensor::{Dim, Tensor};

/// K or V of a paged cache: row `(page, token, head)` begins at
/// `data + (page * page_stride + token * token_stride + head * head_stride) * element size`; its elements are
/// neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvView {
    /// Row (0, 0, 0).
    pub data: *mut u8,
    /// Elements from a page to the next.
    pub page_stride: i64,
    /// Elements from a token to the next of its page.
    pub token_stride: i64,
    /// Elements from a KV head to the next.
    pub head_stride: i64,
}

// SAFETY: an address and numbers; see `Tensor`.
unsafe impl Send for KvView {}
// SAFETY: as above.
unsafe impl Sync for KvView {}

/// How K and V share one buffer: the attribute `kv_layout` (`docs/semantics.md#kv-caches`).
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

    /// The shape a cache of this layout has; `heads` is what is known of Hkv, `head_dim` is set by another operand.
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

    /// Hkv of a cache of this layout; `None` where its heads are no pairs.
    pub(crate) fn kv_heads(self, cache: &Tensor) -> Option<i64> {
        let heads = cache.dims[self.axes().1 + 1];
        match self {
            Self::Interleaved => (heads % 2 == 0).then_some(heads / 2),
            Self::Stacked | Self::PerPage => Some(heads),
        }
    }

    /// (axis of the pages, axis of the tokens) in a cache of this layout.
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
        // K to V, and head to head, in elements.
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
    /// The view of packed rows `[Tk, Hkv, D]` of K or V.
    pub(crate) fn packed(rows: &Tensor) -> Self {
        Self { data: rows.data, page_stride: 0, token_stride: rows.stride(0), head_stride: rows.stride(1) }
    }

    /// The view of a buffer `[P, page_size, Hkv, D]` that holds K or V alone.
    pub(crate) fn alone(cache: &Tensor) -> Self {
        Self {
            data: cache.data,
            page_stride: cache.stride(0),
            token_stride: cache.stride(1),
            head_stride: cache.stride(2),
        }
    }
}
