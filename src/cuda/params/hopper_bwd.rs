//! Parameters of the backward kernels of sm_90a.

use super::attention_bwd::BackwardParams;
use super::key_ranges::KeyRangeSource;
use super::tensor_map::TensorMap;
use std::ffi::c_void;

/// A sequence, reduced to the queries that attend to some key and the keys that some query attends to. Indices are relative
/// to the first of each: query i attends to keys `i + shift - window_left` to `i + shift + window_right`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SequencePlan {
    /// Index of its first tile: the number of tiles, over all KV heads, of the sequences before it in this list.
    pub first_tile: i32,
    /// First row of Q.
    pub first_query: i32,
    pub num_queries: i32,
    /// First row of K and V.
    pub first_key: i32,
    /// 0 if `num_queries` is 0.
    pub num_keys: i32,
    pub shift: i32,
    /// Its first row tile of `dq_accum`.
    pub first_row_tile: i32,
    /// Its first query block, counted over all sequences of the batch.
    pub first_query_block: i32,
    /// Its index in the batch.
    pub sequence: i32,
}

/// The first rows of Q and of K and V of a sequence, from which a bias is counted; and how many keys its plan begins with that
/// no query attends to, because TMA takes a bias from a multiple of 16 bytes on.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SequenceStart {
    pub query: i32,
    pub key: i32,
    pub hidden_keys: i32,
}

/// What `hopper_bwd_prepare` writes for the kernel after it, besides the lists of sequences. `next_tile`, `next_query_tile`
/// and `next_finish_item` are the schedulers' counters of tiles, of the tiles of dQ past 128 columns, and of the work after
/// them.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BackwardPlan {
    pub next_tile: u64,
    pub next_query_tile: u64,
    pub next_finish_item: u64,
    pub num_tiles: i32,
    /// The tiles of the first sequences whose head groups fill whole waves of CTAs; 0 on a GPU with other waves.
    pub num_wave_tiles: i32,
}

/// The tensor maps are `[2^31, rows, 2^30 rows, head, column]`; see `RaggedRows`. A box has the rows of a block, one head
/// and the columns of a swizzle atom.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperBackwardParams {
    /// `delta` is not null.
    pub base: BackwardParams,
    pub q: TensorMap,
    pub k: TensorMap,
    pub v: TensorMap,
    pub dout: TensorMap,
    pub dk: TensorMap,
    pub dv: TensorMap,
    /// `[Hq, Tq]`
    pub lse_log2: *mut f32,
    /// f32 accumulators of dQ: for each of Hq heads, of the first 64 columns (or 32 of 64) and then of the remaining ones,
    /// `[num_row_tiles, columns / 8, 32, 4]`; see `dq_accum_row_tile()`.
    pub dq_accum: *mut f32,
    /// `[Hq, num_query_blocks]`: number of key blocks whose contributions are in `dq_accum`.
    pub dq_semaphore: *mut i32,
    /// `[B]`, in tile order.
    pub sequences_by_tile: *mut SequencePlan,
    /// `[B]`, in row order.
    pub sequences_by_row: *mut SequencePlan,
    pub plan: *mut BackwardPlan,
    /// `[B]`, where calls with a bias need them; otherwise null.
    pub sequence_starts: *mut SequenceStart,
    pub num_row_tiles: i32,
    /// Queries per query block, which differ between kernels of the same columns.
    pub block_queries: i32,
    /// Query blocks per head, over all sequences.
    pub num_query_blocks: i32,
    /// Of the GPU.
    pub num_sms: i32,
    /// The parts into which the query heads of a KV head are split. `base.forward` then has each part as a KV head,
    /// whose `group` the last part may not fill, but `k` and `v` have the call's own.
    pub head_splits: i32,
    pub num_q_heads: i32,
    /// Query heads per KV head of the call.
    pub kv_group: i32,
    /// Whether `base.dk` and `base.dv` are f32: the gradients of the call, or partial sums, one per part.
    pub widens_key_gradients: i32,
}

/// The keys `[begin, end)` of a query row that has bounds of its keys, counted from the first key of its sequence's plan; 0 and
/// 0 if it attends to none.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub struct RowKeys {
    pub begin: i32,
    pub end: i32,
}

/// The keys of such rows of a query block: `[begin, end)` is the smallest range with the keys of all its rows, each row attends
/// to all of `[common_begin, common_end)`. All are 0 if no row attends to a key.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct QueryBlockKeys {
    pub begin: i32,
    pub end: i32,
    pub common_begin: i32,
    pub common_end: i32,
}

/// What attends to a block of keys of a sequence whose rows have bounds.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct KeyBlockQueries {
    /// The query blocks from the first to the last whose range of keys reaches into the block; if there is none, any one of the
    /// sequence.
    pub first_block: i32,
    pub num_blocks: i32,
    /// Bit i % 32 of word i / 32 is set if some row attends to key i of the block, or if there is no such key.
    pub attended: [u32; 4],
}

/// The parameter of `hopper_bwd_*_key_ranges` and of `hopper_bwd_plan_ranges`, which writes the lists.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperKeyRangeBackwardParams {
    pub common: HopperBackwardParams,
    pub ranges: KeyRangeSource,
    /// `[Tq]`
    pub row_keys: *mut RowKeys,
    /// `[num_query_blocks]`
    pub query_block_keys: *mut QueryBlockKeys,
    /// Blocks of 128 keys over all sequences; see `first_key_block()`.
    pub key_block_queries: *mut KeyBlockQueries,
}

/// The parameter of `hopper_bwd_*_bias`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperBiasBackwardParams {
    /// `sequence_starts` is not null.
    pub common: HopperBackwardParams,
    /// Of the bias and of its gradient, `[1, 1, matrix, row, key]`; a box has the queries of a step and 128 bytes of keys.
    pub bias: TensorMap,
    pub dbias: TensorMap,
    /// The gradient itself, dense; null if the kernel does not store it.
    pub dbias_data: *mut c_void,
    /// Rows and keys of a matrix.
    pub rows: i32,
    pub keys: i32,
    /// Matrices from a sequence or a query head to the next one, as `BiasSource` has them.
    pub seq_matrices: i32,
    pub head_matrices: i32,
    /// Whether the kernel stores dbias. Then each pair of a row and a key has a bias of its own.
    pub stores_dbias: i32,
    /// Whether L2 evicts the bias, which each CTA reads once, and its gradient before what it has else.
    pub evicts_bias_first: i32,
    pub evicts_dbias_first: i32,
    pub reserved: i32,
}

/// The parameter of `hopper_bwd_dbias`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperDbiasParams {
    /// `delta` is not null.
    pub backward: BackwardParams,
    /// As those of [`HopperBackwardParams`], in boxes of 128 rows.
    pub q: TensorMap,
    pub k: TensorMap,
    pub v: TensorMap,
    pub dout: TensorMap,
    /// `[1, 1, matrix, row, key]`, in boxes of 128 rows and 64 keys.
    pub bias: TensorMap,
    /// `[Hq, Tq]`
    pub lse_log2: *mut f32,
    /// The shape of the bias, dense.
    pub dbias: *mut c_void,
    /// The shape of the bias. Sequences and heads: 1 where they share it.
    pub seqs: i32,
    pub heads: i32,
    pub rows: i32,
    pub keys: i32,
    pub dbias_is_f32: i32,
    pub reserved: i32,
}

/// Parameters of `hopper_bwd_combine`, which adds up the partial sums of split query heads.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CombineGradientsParams {
    /// f32 `[Tk, Hkv * head_splits, D]`
    pub partial_dk: *const f32,
    /// f32 `[Tk, Hkv * head_splits, Dv]`
    pub partial_dv: *const f32,
    /// `[Tk, Hkv, D]`, of the operands' dtype or f32
    pub dk: *mut c_void,
    /// `[Tk, Hkv, Dv]`, of the dtype of `dk`
    pub dv: *mut c_void,
    /// Chunks of eight columns of `dk` and of `dv`.
    pub dk_chunks: i64,
    pub dv_chunks: i64,
    /// Chunks per head of `dk` and of `dv`.
    pub dk_head_chunks: i32,
    pub dv_head_chunks: i32,
    pub head_splits: i32,
    /// Whether `dk` and `dv` are f32.
    pub widens_gradients: i32,
}

/// Threads per CTA of `hopper_bwd_combine`. Each adds up one chunk of eight columns.
pub const COMBINE_GRADIENTS_THREADS: u32 = 256;

/// Parameters of the kernels past 128 columns.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperWideBackwardParams {
    /// With the tensor maps of the kernel of dK and dV.
    pub common: HopperBackwardParams,
    /// Tensor maps of the kernel of dQ.
    pub q: TensorMap,
    pub k: TensorMap,
    pub v: TensorMap,
    pub dout: TensorMap,
}
