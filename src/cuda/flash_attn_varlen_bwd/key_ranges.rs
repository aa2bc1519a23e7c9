//! What Hopper's gradients up to 128 columns need besides for rows with bounds of their keys: memory in the workspace, and the
//! kernel that computes the ranges of rows and blocks (`hopper_bwd_plan_ranges`).

use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::hopper_bwd::{
    HopperBackwardParams, HopperKeyRangeBackwardParams, KeyBlockQueries, QueryBlockKeys, RowKeys,
};
use crate::cuda::params::key_ranges::KeyRangeSource;
use crate::problem::attention::Attention;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;

/// Keys of a block, threads per CTA, and query blocks per CTA, as `kernels/hopper_bwd_plan_ranges.cu` has them.
const KEYS: usize = 128;
const THREADS: u32 = 256;
const QUERY_BLOCKS: usize = 8;

/// Addresses of the lists of ranges in the workspace.
#[derive(Clone, Copy)]
pub(super) struct KeyRangeLayout {
    row_keys: *mut u8,
    query_block_keys: *mut u8,
    key_block_queries: *mut u8,
    num_query_blocks: usize,
    num_key_blocks: usize,
}

impl KeyRangeLayout {
    /// Lays the lists out; `place` takes the next bytes of the workspace.
    pub(super) fn new(
        [rows, seqs, keys]: [usize; 3],
        num_query_blocks: usize,
        place: &mut impl FnMut(usize) -> *mut u8,
    ) -> Self {
        // Each sequence begins at a new block.
        let num_key_blocks = (keys + (KEYS - 1) * seqs) / KEYS + 1;
        Self {
            row_keys: place(size_of::<RowKeys>() * rows),
            query_block_keys: place(size_of::<QueryBlockKeys>() * num_query_blocks),
            key_block_queries: place(size_of::<KeyBlockQueries>() * num_key_blocks),
            num_query_blocks,
            num_key_blocks,
        }
    }

    /// The parameter of `hopper_bwd_plan_ranges` and of the kernel after it.
    pub(super) fn params(
        &self,
        problem: &FlashAttnVarlenBwd,
        common: &HopperBackwardParams,
    ) -> HopperKeyRangeBackwardParams {
        let Attention { queries, .. } = &problem.forward;
        HopperKeyRangeBackwardParams {
            common: *common,
            ranges: KeyRangeSource::new(&queries.key_ranges),
            row_keys: self.row_keys.cast(),
            query_block_keys: self.query_block_keys.cast(),
            key_block_queries: self.key_block_queries.cast(),
        }
    }

    /// The launch configuration of `hopper_bwd_plan_ranges`.
    pub(super) fn plan_config(&self) -> LaunchConfig {
        let ctas = self.num_query_blocks.div_ceil(QUERY_BLOCKS) + self.num_key_blocks;
        LaunchConfig { grid: [ctas as u32, 1, 1], threads: THREADS, shared_memory: 0 }
    }
}
