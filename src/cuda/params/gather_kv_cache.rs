//! Parameters of the kernels `gather_kv_cache` and `gather_kv_cache_starts`.

/// Threads per CTA.
pub const GATHER_THREADS: u32 = 256;

/// Maximum sequences whose starts each CTA computes itself. With more of them `gather_kv_cache_starts` is launched first.
pub const GATHER_SEQS: u32 = 1024;

/// Threads per CTA of `gather_kv_cache_starts`.
pub const GATHER_STARTS_THREADS: u32 = 1024;

/// Sequences per CTA of `gather_kv_cache_starts`.
pub const GATHER_STARTS_SEQS: u32 = 4096;

/// How the cache's elements are decoded; `None` if they have the dtype of the results.
#[derive(Clone, Copy)]
#[repr(i32)]
pub enum Fp8Encoding {
    None,
    F8E4M3Fn,
    F8E5M2,
}

/// A divisor of any dividend, without a branch.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ExactDivisor {
    pub divisor: u32,
    /// The halves of 2^64 / divisor, rounded up. The kernels do not use them for divisor 1.
    pub inverse_high: u32,
    pub inverse_low: u32,
}

/// K or V: the rows of the cache and the results. Strides are in bytes; the elements of a head are contiguous.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct GatheredRows {
    pub cache: *const u8,
    pub page_stride: i64,
    pub token_stride: i64,
    pub head_stride: i64,
    /// `[N, Hkv, D]`
    pub rows: *mut u8,
    /// Dequantization scale, which multiplies the rows; null is 1.
    pub scale: *const f32,
    /// 0 for one scale, 1 for one per head.
    pub scale_stride: i64,
    /// Vectors per head.
    pub head_vectors: ExactDivisor,
    /// Vectors per row of all heads.
    pub row_vectors: u32,
    /// Adjacent vectors of K before those of V follow, and vice versa: a head's if the two alternate, else a row's.
    pub group_vectors: u32,
}

/// The parameter of both kernels.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct GatherParams {
    pub keys: GatheredRows,
    pub values: GatheredRows,
    /// `[S, M]`
    pub table: *const i32,
    pub table_stride: i64,
    /// `[S]`
    pub context_lens: *const i32,
    /// `[S+1]`
    pub cu_seqlens: *mut i32,
    pub num_seqs: i32,
    /// N
    pub capacity: i32,
    /// Maximum tokens per sequence: the capacity of a row of the page table.
    pub longest: i32,
    pub page_size: ExactDivisor,
    pub num_pages: i32,
    /// Rows per CTA.
    pub cta_rows: i32,
    pub encoding: Fp8Encoding,
    /// Elements per vector: 16 bytes of the results, 8 bytes for u8, or 1 element if addresses or strides are not aligned.
    pub vector_elements: i32,
    /// Adjacent threads that copy one row: all vectors of a row, at most the threads of a CTA.
    pub width: ExactDivisor,
    /// Rows that the threads of a CTA copy at once.
    pub rows_at_once: u32,
    /// The sum of `group_vectors` of K and V.
    pub group_vectors: ExactDivisor,
    /// 1 for calls of few rows and sequences, in which each warp finds its tokens itself. A warp then copies one row at a
    /// time.
    pub warps_find_tokens: i32,
}
