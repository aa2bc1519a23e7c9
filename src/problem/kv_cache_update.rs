//! Writes the K and V rows of new tokens into a paged cache in place (`docs/semantics.md#kv_cache_update`).

pub use super::cache_copy::CacheCopy;
use super::kv_layout::KvLayout;
use super::validate::{Scale, contiguous_rows, dense, head_dim, kernel_sizes, scale};
use super::{CallArguments, CallResult, I64Attribute, KvScaleCache, KvView, Operand};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// Element types of key and value. The cache has the same one, or one of [`FP8_DTYPES`].
pub const DTYPES: &[DType] = &[DType::F16, DType::BF16, DType::F32];

/// Element types of a quantized cache, which stores keys and values of each of [`DTYPES`].
pub const FP8_DTYPES: [DType; 2] = [DType::F8E4M3FN, DType::F8E5M2];

/// K or V: the new rows and where they go.
#[derive(Clone, Copy, Debug)]
pub struct NewRows<'a> {
    /// `[T, Hkv, D]`; the last dimension is contiguous
    pub rows: Tensor<'a>,
    /// The result cache.
    pub cache: KvView,
    /// Quantization scale, which divides the rows.
    pub scale: Option<Scale>,
}

/// A validated call.
#[derive(Clone, Copy, Debug)]
pub struct KvCacheUpdate<'a> {
    /// New keys.
    pub key: NewRows<'a>,
    /// New values. If K and V are in two buffers, their D may differ from the keys'.
    pub value: NewRows<'a>,
    /// Element type of the caches: that of key and value, or one of [`FP8_DTYPES`], or with scales i8 or e4m3fn
    pub cache_dtype: DType,
    /// Scales of the rows of the result cache, which are computed of the new rows and stored with them. There is then no
    /// [`NewRows::scale`].
    pub scale_cache: Option<KvScaleCache>,
    /// `[T]`, i32 or i64, dense
    pub slot_mapping: Tensor<'a>,
    /// The cache buffers: one for K and V together and maybe one for scales, or one for K and one for V.
    pub copies: [Option<CacheCopy<'a>>; 2],
    /// P
    pub num_pages: usize,
    /// Tokens per page.
    pub page_size: usize,
}

/// Validates a call for a cache in one buffer, in the layout of the attribute `kv_layout`.
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<KvCacheUpdate<'a>> {
    KvCacheUpdate::with_scale_cache(args, layout(args)?)
}

/// Validates the attribute `kv_layout`.
pub(super) fn layout(args: &CallArguments) -> Result<KvLayout> {
    let number = args.i64(I64Attribute::KvLayout);
    KvLayout::from_number(number).ok_or_else(|| Error::invalid(format!("kv_layout is {number}, expected 1, 2 or 3")))
}

impl<'a> KvCacheUpdate<'a> {
    /// The problem for a cache in one buffer of this layout of a target that may have scales.
    pub(super) fn with_scale_cache(args: &CallArguments<'a>, layout: KvLayout) -> Result<Self> {
        let cache = args.operand(Operand::KvCache);
        let scales = KvScaleCache::updated(args, "kv_cache", &cache, layout)?;
        let update = Self::of_dtypes(args, layout, scales.map(|_| cache.dtype))?;
        let Some((scale_cache, copy)) = scales else { return Ok(update) };
        Ok(Self { scale_cache: Some(scale_cache), copies: [update.copies[0], Some(copy)], ..update })
    }

    /// The problem for a cache in one buffer of this layout, without scales of its rows.
    pub(super) fn in_one_buffer(args: &CallArguments<'a>, layout: KvLayout) -> Result<Self> {
        Self::of_dtypes(args, layout, None)
    }

    /// The problem for a cache in one buffer of this layout, and of `scaled` if its rows have scales.
    fn of_dtypes(args: &CallArguments<'a>, layout: KvLayout, scaled: Option<DType>) -> Result<Self> {
        let (key, value) = (args.operand(Operand::Key), args.operand(Operand::Value));
        check_rows("key", &key, None)?;
        check_rows("value", &value, Some(&key))?;
        let (cache, out) = (args.operand(Operand::KvCache), args.result(CallResult::KvCache));
        if scaled.is_none() {
            check_cache_dtype("kv_cache", &cache, &key)?;
        }
        cache.expect_shape("kv_cache", &layout.shape(Dim::Is("Hkv", key.dims[1]), key.dims[2]))?;
        let copy = same_cache("kv_cache", cache, out)?;
        let (pages, tokens) = layout.axes();
        let (k, v) = layout.views(&out);
        let sizes = (cache.dims[pages], cache.dims[tokens]);
        Self::assemble(args, (key, k), (value, v), (cache.dtype, [Some(copy), None]), sizes)
    }

    /// The problem for K `[P, page_size, Hkv, D]` and V `[P, page_size, Hkv, Dv]` in two buffers.
    pub(super) fn in_two_buffers(args: &CallArguments<'a>) -> Result<Self> {
        let (key, value) = (args.operand(Operand::Key), args.operand(Operand::Value));
        check_rows("key", &key, None)?;
        check_rows("value", &value, None)?;
        value.expect_dtype("value", &[key.dtype])?;
        let same = [Dim::Is("T", key.dims[0]), Dim::Is("Hkv", key.dims[1]), Dim::Any("Dv")];
        value.expect_shape("value", &same)?;
        let (k_cache, v_cache) = (args.operand(Operand::KCache), args.operand(Operand::VCache));
        check_cache_dtype("k_cache", &k_cache, &key)?;
        v_cache.expect_dtype("v_cache", &[k_cache.dtype])?;
        let heads = Dim::Is("Hkv", key.dims[1]);
        let shape = [Dim::Any("num_pages"), Dim::Any("page_size"), heads, Dim::Is("D", key.dims[2])];
        k_cache.expect_shape("k_cache", &shape)?;
        let (pages, page_size) = (k_cache.dims[0], k_cache.dims[1]);
        let shape = [Dim::Is("num_pages", pages), Dim::Is("page_size", page_size), heads, Dim::Is("Dv", value.dims[2])];
        v_cache.expect_shape("v_cache", &shape)?;
        let (k_out, v_out) = (args.result(CallResult::KCache), args.result(CallResult::VCache));
        let copies = [Some(same_cache("k_cache", k_cache, k_out)?), Some(same_cache("v_cache", v_cache, v_out)?)];
        let (k, v) = (KvView::alone(&k_out), KvView::alone(&v_out));
        Self::assemble(args, (key, k), (value, v), (k_cache.dtype, copies), (pages, page_size))
    }

    fn assemble(
        args: &CallArguments<'a>,
        (key, k): (Tensor<'a>, KvView),
        (value, v): (Tensor<'a>, KvView),
        (cache_dtype, copies): (DType, [Option<CacheCopy<'a>>; 2]),
        (pages, page_size): (i64, i64),
    ) -> Result<Self> {
        let slot_mapping = args.operand(Operand::SlotMapping);
        slot_mapping.expect_dtype("slot_mapping", &[DType::I32, DType::I64])?;
        slot_mapping.expect_shape("slot_mapping", &[Dim::Is("T", key.dims[0])])?;
        dense("slot_mapping", &slot_mapping)?;
        kernel_sizes(&[("T", key.dims[0]), ("num_pages", pages), ("page_size", page_size)])?;
        let (k_scale, v_scale) =
            (scale(args, Operand::KScale, key.dims[1])?, scale(args, Operand::VScale, key.dims[1])?);
        Ok(Self {
            key: NewRows { rows: key, cache: k, scale: k_scale },
            value: NewRows { rows: value, cache: v, scale: v_scale },
            cache_dtype,
            scale_cache: None,
            slot_mapping,
            copies,
            num_pages: pages as usize,
            page_size: page_size as usize,
        })
    }
}

/// Validates `key` or `value`, `[T, Hkv, D]`, with the shape and dtype of `like` if that is given.
fn check_rows(name: &'static str, rows: &Tensor, like: Option<&Tensor>) -> Result {
    rows.expect_dtype(name, DTYPES)?;
    rows.expect_shape(name, &[Dim::Any("T"), Dim::Any("Hkv"), Dim::Any("D")])?;
    if let Some(key) = like {
        rows.expect_dtype(name, &[key.dtype])?;
        let [t, heads, d] = [0, 1, 2].map(|i| key.dims[i]);
        rows.expect_shape(name, &[Dim::Is("T", t), Dim::Is("Hkv", heads), Dim::Is("D", d)])?;
    }
    ensure(rows.dims[1] > 0, || format!("{name} has shape {:?}, expected at least one head", rows.dims))?;
    head_dim(name, rows.dims[2])?;
    contiguous_rows(name, rows)
}

fn check_cache_dtype(name: &str, cache: &Tensor, key: &Tensor) -> Result {
    cache.expect_dtype(name, &[key.dtype, FP8_DTYPES[0], FP8_DTYPES[1]])
}

/// Validates that operand and result of a cache have the same shape and dtype, and can be copied unless they alias.
pub(super) fn same_cache<'a>(name: &str, from: Tensor<'a>, to: Tensor<'a>) -> Result<CacheCopy<'a>> {
    let result = format!("result {name}");
    to.expect_dtype(&result, &[from.dtype])?;
    ensure(to.dims == from.dims, || {
        format!("{result} has shape {:?}, expected the operand's, {:?}", to.dims, from.dims)
    })?;
    contiguous_rows(name, &from)?;
    contiguous_rows(&result, &to)?;
    let copy = CacheCopy { from, to };
    ensure(!copy.is_needed() || (from.is_dense() && to.is_dense()), || {
        format!("{name} is strided and not updated in place; alias the result to the operand")
    })?;
    Ok(copy)
}
