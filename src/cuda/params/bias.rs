//! Parameters of the kernels for calls with a bias of pairs of rows and keys.

use super::attention::AttentionParams;
use super::attention_bwd::BackwardParams;
use std::ffi::c_void;

/// Rows and keys of a tile of `attention_bwd_dbias`, its threads, and its dynamic shared memory.
pub const DBIAS_ROWS: i32 = 128;
pub const DBIAS_KEYS: i32 = 64;
pub const DBIAS_THREADS: i32 = 256;
pub const DBIAS_SHARED_BYTES: i32 = 75_864;

/// The same of `attention_bwd_dbias_aligned`, whose shared memory has a number of stages, a power of two, and other things.
pub const ALIGNED_DBIAS_ROWS: i32 = 128;
pub const ALIGNED_DBIAS_KEYS: i32 = 128;
pub const ALIGNED_DBIAS_THREADS: i32 = 256;
pub const ALIGNED_DBIAS_STAGE_BYTES: i32 = 32_768;
pub const ALIGNED_DBIAS_OTHER_BYTES: i32 = 35_716;

/// Threads of `attention_bwd_dbias_sum`, and the keys of a tile: 16 per lane of a warp.
pub const DBIAS_SUM_THREADS: i32 = 256;
pub const DBIAS_SUM_KEYS: i32 = 512;

/// The packed query rows that a CTA of `attention_bwd_dq_from_ds` has.
pub const DQ_FROM_DS_ROWS: i32 = 128;

/// Up to so many keys of a block of `attention_bwd_dkdv`, and packed query rows of one of `attention_bwd_dq_from_ds`, are computed one
/// after the other, which then is faster.
pub const FEW_ROWS: i32 = 2;

/// Threads of `attention_bwd_delta`, and the query rows of a head that a CTA has.
pub const DELTA_THREADS: i32 = 256;
pub const DELTA_ROWS: i32 = 32;

/// A bias `[B or 1, Hq or 1, rows, keys]`, dense and aligned to 16 bytes, of fewer than 2^32 - 1 rows; 0 past its rows and keys.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BiasSource {
    pub data: *const c_void,
    /// Matrices `[rows, keys]` from a sequence or a head to the next one; 0 where all share it.
    pub seq_matrices: i32,
    pub head_matrices: i32,
    pub rows: i32,
    pub keys: i32,
    /// Whether it is f32 and q is not.
    pub is_wide: i32,
    pub reserved: i32,
}

/// The parameter of `attention_bias`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BiasParams {
    pub attention: AttentionParams,
    pub bias: BiasSource,
}

/// dS of pairs of rows and keys in q's type, which the tiles of `attention_bwd_dkdv` that say `stores_ds` in `variants.toml` store for the
/// kernels after them.
///
/// A row is one of the bias, with its key 0 in column 0; or one of each query head and token, `[Hq, Tq]`. Then, unless blocks of keys begin
/// with sequences, column 0 is the last key row of K, a multiple of 8, that is not after the sequence's first one: the chunks of 16 bytes are
/// those of 8 rows of K that a thread has.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ScoreGradients {
    /// Null where they are not stored.
    pub data: *mut c_void,
    /// Elements from row to row; a multiple of 8 for rows of query heads and tokens.
    pub pitch: i32,
    /// Whether there is a row of each query head and token.
    pub has_token_rows: i32,
}

/// The parameter of `attention_bwd_*_bias`, of `attention_bwd_dbias` and `attention_bwd_dbias_aligned`, and of the kernels that read its beginning.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BiasBackwardParams {
    pub backward: BackwardParams,
    pub bias: BiasSource,
    /// The shape of the bias, dense.
    pub dbias: *mut c_void,
    /// Sequences and heads of the bias: 1 where they share it.
    pub seqs: i32,
    pub heads: i32,
    pub dbias_is_f32: i32,
    /// Whether `attention_bwd_dq_*_bias` stores dbias of all rows that attend to some key. Then each pair of a row and a key has a bias of
    /// its own.
    pub dq_stores_dbias: i32,
    /// Adjacent tiles of keys that a CTA of the kernel for dbias computes one after the other.
    pub tiles_per_cta: i32,
    /// Keys of a row of dbias, which the bias has too unless its rows have been padded.
    pub dbias_keys: i32,
    /// Stages of `attention_bwd_dbias_aligned`.
    pub dbias_stages: i32,
    /// Warps of `attention_bwd_dbias_sum` that divide the sequences and heads of a row: a power of two.
    pub dbias_warps_per_row: i32,
    /// Rows of K after which blocks of keys begin anew (`RowBlocks`), if sequences begin with them; all if that is not worth it.
    pub key_period: i32,
    /// Likewise rows of q after which blocks of query rows of `attention_bwd_dq_from_ds` begin anew.
    pub query_period: i32,
    /// The blocks of a period that come together, before as many of the next one (`RowBlocks`).
    pub key_blocks_per_turn: i32,
    pub query_blocks_per_turn: i32,
    pub ds: ScoreGradients,
}

/// Threads of `copy_bias_rows`, and the rows of a CTA, one per warp.
pub const COPY_ROWS_THREADS: i32 = 256;
pub const COPY_ROWS_PER_CTA: i32 = 8;

/// The parameter of `copy_bias_rows`: `rows` rows of 16-bit elements, which begin `from_pitch` and `to_pitch` elements after each
/// other. Columns from `columns` up to `width` are stored as zeros; there is room for them.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CopyRowsParams {
    pub from: *const u16,
    pub to: *mut u16,
    pub rows: i64,
    pub from_pitch: i64,
    pub to_pitch: i64,
    pub columns: i32,
    pub width: i32,
}
