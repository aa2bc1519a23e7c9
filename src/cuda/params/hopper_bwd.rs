//! The kernels of attention's gradients of sm_90a.

use super::attention_bwd::BackwardParams;
use super::tensor_map::TensorMap;

/// One sequence as the kernels see it: the queries that see some key, and the keys that some query sees. Both are counted
/// from the first of them. Query i sees the keys from `i + shift - window_left` to `i + shift + window_right`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SequencePlan {
    /// Tiles of the sequences before it in this list, of all KV heads.
    pub first_tile: i32,
    /// Row of Q.
    pub first_query: i32,
    pub num_queries: i32,
    /// Row of K and V.
    pub first_key: i32,
    /// 0 where `num_queries` is.
    pub num_keys: i32,
    pub shift: i32,
    /// Of the sums of dQ.
    pub first_row_tile: i32,
    /// Its first block of queries among the turns of a head.
    pub first_query_block: i32,
    /// Its number in the batch.
    pub sequence: i32,
}

/// What `hopper_bwd_prepare` leaves for the kernels after it, besides lists.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BackwardPlan {
    pub next_tile: u64,
    pub next_query_tile: u64,
    pub num_tiles: i32,
    pub num_head_groups: i32,
}

/// The tensor maps are `[2^31, rows, 2^30 rows, head, column]`; see `RaggedRows`. A box is 64 columns of a block's rows of
/// one head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperBackwardParams {
    /// `delta` is given.
    pub base: BackwardParams,
    pub q: TensorMap,
    pub k: TensorMap,
    pub v: TensorMap,
    pub dout: TensorMap,
    pub dk: TensorMap,
    pub dv: TensorMap,
    /// `[Hq, Tq]`
    pub lse_log2: *mut f32,
    /// Of each of Hq heads and the first 64 columns and those that are left `[num_row_tiles, columns / 8, 32, 4]`; see
    /// `group_sums()`.
    pub dq_accum: *mut f32,
    /// `[Hq, num_query_blocks]`: blocks of keys whose share of dQ is in the sums.
    pub dq_semaphore: *mut i32,
    /// `[B]`, in the order of tiles.
    pub sequences_by_tile: *mut SequencePlan,
    /// `[B]`, in the order of rows.
    pub sequences_by_row: *mut SequencePlan,
    pub plan: *mut BackwardPlan,
    pub num_row_tiles: i32,
    /// Turns per head.
    pub num_query_blocks: i32,
}

/// Of the kernels past 128 columns.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperWideBackwardParams {
    /// With the boxes of the kernel of dK and dV.
    pub common: HopperBackwardParams,
    /// With the boxes of the kernel of dQ.
    pub q: TensorMap,
    pub k: TensorMap,
    pub v: TensorMap,
    pub dout: TensorMap,
}
