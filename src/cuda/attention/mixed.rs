//! Decode and prefill of a batch in one launch on Hopper: which calls it takes, and with what argument.
//!
//! As in [`hopper`](super::hopper), the choice follows from static sizes and options alone.

use super::hopper::{Prefill, PrefillParams, counter_place};
use super::params::Params;
use super::split::Split;
use super::tiles::{Tile, modifies_scores};
use crate::cuda::device::Device;
use crate::cuda::launch::Shape;
use crate::cuda::tensor_map::TensorMap;
use crate::cuda::variants;
use crate::error::Result;
use crate::ops::attention::{Attention, KeyStorage};
use std::mem::offset_of;

pub(super) const KERNEL: &str = "hopper_mixed";

/// What stands at the beginning of the workspace: the number of the next tile of prefill, and what keeps the rest
/// aligned.
const COUNTER_BYTES: usize = 64;

/// Tokens of a page that decode fetches together: `kGranule` of `kernels/include/row_pairs.cuh`.
const GRANULE: i64 = 16;

/// Rows for each sequence slot, in multiples of the most that are decoded, from which on a batch is taken to have enough
/// prefill. In one of decode alone this kernel is slower than decode's own (64 x 8k: 4 %).
const ROWS_A_SEQUENCE: i64 = 2;

/// How the kernel takes a problem that it can take.
#[derive(Clone, Copy)]
pub(super) struct Mixed {
    prefill: Prefill,
    decode: &'static Tile,
    /// Tiles of decode that a KV head can have.
    decode_tiles: i64,
    /// Queries up to which a sequence is decoded.
    few: i32,
}

/// `MixedParams` of `kernels/include/hopper/mixed.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct MixedParams {
    prefill: PrefillParams,
    k: TensorMap,
    v: TensorMap,
    decode: Params,
}

// The header asserts the same numbers.
const _: () = assert!(offset_of!(MixedParams, decode) == 1344 && size_of::<MixedParams>() == 1856);

impl Mixed {
    /// For sequences of at most `few` queries that are decoded, in `decode_tiles` tiles a KV head at most, and longer ones
    /// for `prefill`. `None` where there have to be two launches.
    pub(super) fn of(
        problem: &Attention,
        device: &Device,
        prefill: Prefill,
        decode_tiles: i64,
        few: i64,
    ) -> Option<Self> {
        let decode = Tile::of(problem, "mixed").ok()?;
        let is_built = [problem.head_dim, problem.value_dim] == [decode.head_dim; 2] && !modifies_scores(problem);
        let is_mixed = problem.num_rows as i64 > ROWS_A_SEQUENCE * few * problem.max_seqs as i64;
        let has_granules =
            matches!(problem.keys.storage, KeyStorage::Paged(table) if table.page_size as i64 % GRANULE == 0);
        let fits = decode.shared_memory <= device.shared_memory && problem.num_kv_heads <= device.sms as usize;
        let has_counter = !counter_place(problem).is_null();
        let mixed = Self { prefill, decode, decode_tiles, few: few as i32 };
        let can_be = is_built && has_granules && prefill.has_key_boxes(problem) && fits && has_counter;
        (can_be && is_mixed && !problem.batch_invariant).then_some(mixed)
    }

    /// The kernel: its index in the table of variants.
    pub(super) fn variant(&self, problem: &Attention) -> Result<usize> {
        variants::find(KERNEL, &[variants::dtype_value(problem.q.dtype), self.prefill.tile.head_dim_value])
    }

    /// A CTA for each SM: how many of them decode follows from the batch.
    pub(super) fn shape(&self, device: &Device) -> Shape {
        let shared_memory = self.decode.shared_memory.max(self.prefill.tile.shared_memory);
        Shape { grid: [device.sms, 1, 1], threads: self.decode.threads, shared_memory }
    }

    /// How the CTAs that decode share out its keys, at most.
    pub(super) fn split(&self, problem: &Attention, device: &Device) -> Split {
        let queries = i64::from(self.few);
        Split::new(problem, self.decode, self.decode_tiles, queries, i64::from(device.sms), COUNTER_BYTES)
    }

    /// The kernel's argument, from that of the portable one for all sequences.
    pub(super) fn params(&self, problem: &Attention, attention: &Params) -> Result<MixedParams> {
        let (mut long, mut decode) = (*attention, *attention);
        long.min_queries = self.few + 1;
        (decode.max_queries, decode.clears_unowned_rows) = (self.few, 0);
        let prefill = self.prefill.params(problem, &long, counter_place(problem))?;
        let map = |view| self.prefill.key_map(problem, view, problem.head_dim, GRANULE);
        Ok(MixedParams { prefill, k: map(&problem.k)?, v: map(&problem.v)?, decode })
    }
}

#[cfg(test)]
mod tests {
    use super::super::hopper::tests::{paged, ragged};
    use super::super::tests::{device, named_on};
    use super::*;
    use crate::tensor::{DType, Tensor};

    const BYTES: [i64; 1] = [9_000_001];

    fn with_workspace(problem: &Attention<'static>) -> Attention<'static> {
        Attention {
            workspace: Some(Tensor::dense(DType::U8, std::ptr::without_provenance_mut(1 << 20), &BYTES)),
            ..*problem
        }
    }

    fn names(problem: &Attention) -> Vec<(&'static str, i32, i32)> {
        named_on(problem, &device(true))
    }

    #[test]
    fn pages_of_whole_boxes_are_decoded_beneath_prefill() {
        let mixed = [("hopper_mixed_bf16_128", 1, i32::MAX)];
        for page_size in [16, 48, 256] {
            assert_eq!(names(&with_workspace(&paged(page_size))), mixed);
        }
        let few_rows = Attention { num_rows: 2 * 2 * 7, ..paged(16) };
        assert_eq!(names(&with_workspace(&Attention { num_rows: 29, ..few_rows })), mixed);
        let mut capped = paged(16);
        capped.score.softcap = 30.0;
        let many_heads = Attention { num_kv_heads: 133, num_q_heads: 133, ..paged(16) };
        let invariant = Attention { batch_invariant: true, ..paged(16) };
        for problem in [few_rows, capped, many_heads, invariant, paged(8), paged(24), ragged()] {
            assert_eq!(names(&with_workspace(&problem)).len(), 2);
        }
        assert_eq!(names(&paged(16)).len(), 2);
    }

    #[test]
    fn parts_of_tiles_lie_past_the_counter() {
        let problem = with_workspace(&paged(16));
        let prefill = Prefill::of(&problem, &device(true)).expect("the kernel takes it");
        let mixed = Mixed::of(&problem, &device(true), prefill, 7, 2).expect("it is paged");
        let split = mixed.split(&problem, &device(true));
        assert_eq!((counter_place(&problem) as usize, split.shares), (1 << 20, 56));
        assert_eq!(split.partial.first_byte() as usize, (1 << 20) + 64);
    }
}
