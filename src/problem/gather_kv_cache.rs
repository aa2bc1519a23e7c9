//! Copies the K and V rows of sequences out of a paged cache into packed rows (`docs/semantics.md#gather_kv_cache`).

use super::attention::{PageTable, page_table};
use super::kv_cache_update::{DTYPES, FP8_DTYPES};
use super::kv_layout::KvLayout;
use super::validate::{Scale, contiguous_rows, dense, head_dim, indices, kernel_sizes, scale};
use super::{CallArguments, CallResult, I64Attribute, KvScaleCache, KvView, Operand};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// Maximum Hkv. With it the kernels can count a row's elements, K and V, in 32 bits.
const MAX_HEADS: i64 = 1 << 22;

/// K or V: the rows in the cache, and the packed rows they are copied to.
#[derive(Clone, Copy, Debug)]
pub struct GatheredRows<'a> {
    /// The rows of the cache.
    pub cache: KvView,
    /// `[N, Hkv, D]`, dense
    pub rows: Tensor<'a>,
    /// Dequantization scale, which multiplies the rows.
    pub scale: Option<Scale>,
}

/// A validated call. Dimensions: N rows of the results, S sequences, `Hkv` heads.
#[derive(Clone, Copy, Debug)]
pub struct GatherKvCache<'a> {
    /// K.
    pub keys: GatheredRows<'a>,
    /// V. If K and V are in two buffers, its head dimension may differ from the keys'.
    pub values: GatheredRows<'a>,
    /// Element type of the cache. The results have the same one, or for one of [`FP8_DTYPES`] one of [`DTYPES`]. With scales
    /// it is i8 or e4m3fn, and the results have one of [`DTYPES`].
    pub cache_dtype: DType,
    /// Scales of the rows, which multiply them.
    pub scale_cache: Option<KvScaleCache>,
    /// The pages of each sequence.
    pub table: PageTable,
    /// `i32[S]`, dense
    pub context_lens: *const i32,
    /// `i32[S+1]`, dense
    pub cu_seqlens: *mut i32,
    /// S
    pub num_seqs: usize,
    /// N
    pub capacity: usize,
    /// Hkv
    pub num_heads: usize,
}

// SAFETY: the struct consists of addresses and numbers; each access through it states why it is allowed (see `Tensor`).
unsafe impl Send for GatherKvCache<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for GatherKvCache<'_> {}

/// Views of K and V in a cache, and its sizes P, `page_size`, Hkv, `[D, Dv]`.
struct Cache {
    views: [KvView; 2],
    pages: i64,
    page_size: i64,
    heads: i64,
    dims: [i64; 2],
}

/// Validates a call and returns its problem.
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<GatherKvCache<'a>> {
    let (k, v) = (args.operand(Operand::KCache), args.operand(Operand::VCache));
    k.expect_dtype("k_cache", &[DTYPES, &FP8_DTYPES, &[DType::I8]].concat())?;
    let cache = match args.i64(I64Attribute::KvLayout) {
        0 => in_two_buffers(&k, &v)?,
        number => in_one_buffer(&k, &v, number)?,
    };
    let scale_cache = scale_cache(args, &k)?;
    ensure(cache.heads > 0, || format!("k_cache has shape {:?}, expected at least one head", k.dims))?;
    contiguous_rows("k_cache", &k)?;
    for (name, dim) in [("k_cache", cache.dims[0]), ("v_cache", cache.dims[1])] {
        head_dim(name, dim)?;
    }
    // With this bound the number of elements of a row, K and V, is below 2^31 for every head dimension.
    if cache.heads > MAX_HEADS {
        return Err(Error::invalid(format!("Hkv is {}, expected at most {MAX_HEADS}", cache.heads)));
    }
    let context_lens = args.operand(Operand::ContextLens);
    let lens = indices("context_lens", &context_lens, &[Dim::Any("S")])?;
    let seqs = context_lens.dims[0];
    let pages = (cache.pages, cache.page_size);
    let table = page_table("block_tables", &args.operand(Operand::BlockTables), ("S", seqs), "k_cache", pages)?;
    if scale_cache.is_some() {
        args.result(CallResult::Keys).expect_dtype("keys with kv_scale_cache", DTYPES)?;
    }
    let keys = gathered(args, &cache, &k, Side::Keys, Dim::Any("N"))?;
    let rows = keys.rows.dims[0];
    let values = gathered(args, &cache, &keys.rows, Side::Values, Dim::Is("N", rows))?;
    let cu_seqlens = indices("cu_seqlens", &args.result(CallResult::CuSeqlens), &[Dim::Is("S+1", seqs + 1)])?;
    kernel_sizes(&[("N", rows), ("S", seqs), ("num_pages", cache.pages)])?;
    Ok(GatherKvCache {
        keys,
        values,
        cache_dtype: k.dtype,
        scale_cache,
        table,
        context_lens: lens,
        cu_seqlens: cu_seqlens.cast_mut(),
        num_seqs: seqs as usize,
        capacity: rows as usize,
        num_heads: cache.heads as usize,
    })
}

/// Validates the optional scales of the rows of a cache `k`, whose shape has been validated.
fn scale_cache(args: &CallArguments, k: &Tensor) -> Result<Option<KvScaleCache>> {
    match KvLayout::from_number(args.i64(I64Attribute::KvLayout)) {
        Some(layout) => KvScaleCache::operand(args, "k_cache", k, layout),
        None if args.optional_operand(Operand::KvScaleCache).is_some() => {
            Err(Error::invalid("kv_scale_cache is given with kv_layout=0, expected 1, 2 or 3"))
        }
        None => ensure(k.dtype != DType::I8, || {
            "k_cache has dtype i8 and kv_layout is 0, expected kv_scale_cache and kv_layout 1, 2 or 3".into()
        })
        .map(|()| None),
    }
}

/// Validates K `[P, page_size, Hkv, D]` and V `[P, page_size, Hkv, Dv]`.
fn in_two_buffers(k: &Tensor, v: &Tensor) -> Result<Cache> {
    ensure(!v.is_left_out(), || "v_cache has no element, expected the values (kv_layout is 0)".into())?;
    v.expect_dtype("v_cache", &[k.dtype])?;
    k.expect_shape("k_cache", &["num_pages", "page_size", "Hkv", "D"].map(Dim::Any))?;
    let [pages, page_size, heads] = [0, 1, 2].map(|axis| k.dims[axis]);
    let same = [Dim::Is("num_pages", pages), Dim::Is("page_size", page_size), Dim::Is("Hkv", heads)];
    v.expect_shape("v_cache", &[same[0], same[1], same[2], Dim::Any("Dv")])?;
    contiguous_rows("v_cache", v)?;
    let views = [KvView::alone(k), KvView::alone(v)];
    Ok(Cache { views, pages, page_size, heads, dims: [k.dims[3], v.dims[3]] })
}

/// Validates a buffer `k` that holds K and V in the layout with this number.
fn in_one_buffer(k: &Tensor, v: &Tensor, number: i64) -> Result<Cache> {
    let layout = KvLayout::from_number(number)
        .ok_or_else(|| Error::invalid(format!("kv_layout is {number}, expected 0, 1, 2 or 3")))?;
    ensure(v.is_left_out(), || {
        format!("v_cache has shape {:?}, expected [0]: with kv_layout={number} k_cache holds the values too", v.dims)
    })?;
    let head_dim = k.dims.last().copied().unwrap_or(0);
    k.expect_shape("k_cache", &layout.shape(Dim::Any("Hkv"), head_dim))?;
    let heads = layout.kv_heads(k);
    ensure(heads.is_some(), || format!("k_cache has shape {:?}, expected 2*Hkv heads", k.dims))?;
    let (pages, tokens) = layout.axes();
    let (k_view, v_view) = layout.views(k);
    Ok(Cache {
        views: [k_view, v_view],
        pages: k.dims[pages],
        page_size: k.dims[tokens],
        heads: heads.unwrap_or(0),
        dims: [head_dim; 2],
    })
}

/// K or V.
#[derive(Clone, Copy)]
enum Side {
    Keys,
    Values,
}

/// Validates the result of K or V: `rows` rows of the dtype of `like` or, for keys of an fp8 cache, of a dtype that it
/// can be decoded to.
fn gathered<'a>(
    args: &CallArguments<'a>,
    cache: &Cache,
    like: &Tensor,
    side: Side,
    rows: Dim,
) -> Result<GatheredRows<'a>> {
    let (result, operand, dim, axis) = match side {
        Side::Keys => (CallResult::Keys, Operand::KScale, "D", 0),
        Side::Values => (CallResult::Values, Operand::VScale, "Dv", 1),
    };
    let (name, tensor) = (result.name(), args.result(result));
    let decoded = matches!(side, Side::Keys) && like.dtype.size() == 1;
    let decodes: &[DType] = if decoded { DTYPES } else { &[] };
    tensor.expect_dtype(name, &[&[like.dtype], decodes].concat())?;
    tensor.expect_shape(name, &[rows, Dim::Is("Hkv", cache.heads), Dim::Is(dim, cache.dims[axis])])?;
    dense(name, &tensor)?;
    let scale = scale(args, operand, cache.heads)?;
    ensure(scale.is_none() || !FP8_DTYPES.contains(&tensor.dtype), || {
        format!("{} is given and {name} has dtype {}, expected f16, bf16 or f32", operand.name(), tensor.dtype)
    })?;
    Ok(GatheredRows { cache: cache.views[axis], rows: tensor, scale })
}
