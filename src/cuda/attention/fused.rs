//! Prefill and decode of a batch in one kernel on Hopper.

use super::hopper::{HopperPrefill, PrefillParameter, counters_address};
use super::split::KvSplit;
use super::tiles::{AttentionTile, transforms_logits};
use super::{Call, Launch, Launches, Parameter, UNLIMITED, decode};
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::kernel_launch::{COUNTER_BYTES, Counters};
use crate::cuda::params::attention::{AttentionParams, TOKENS_PER_LOAD};
use crate::cuda::params::hopper_prefill::HopperFusedParams;
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::attention::KeyStorage;

const KERNEL: &str = "hopper_fused";

/// A batch must have more rows than this many times the rows that all its sequence slots could decode. For decode alone
/// this kernel is slower than decode's own (64 x 8k: 4 %).
const ROWS_PER_SEQUENCE: i64 = 2;

/// Strategy: one launch for short and long sequences.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Call { problem, device, .. } = call;
    let Some((prefill, tile)) = tiles(call) else { return Ok(None) };
    // The tile counter, and arrival counters for no more boundaries between the work ranges of all KV heads than there are CTAs.
    let max_counters = 1 + device.sms as usize;
    let next_tile = counters_address(problem, max_counters);
    if next_tile.is_null() {
        return Ok(None);
    }
    let few = call.max_short_queries();
    let taken = max_counters * COUNTER_BYTES;
    let split = KvSplit::new(problem, tile, decode::max_short_tiles(call), few, i64::from(device.sms), taken);
    let with_partials = |params| AttentionParams { partial: split.partial, ..params };
    let short = with_partials(call.params_for(1, few));
    let long = AttentionParams { clears_padding_rows: 1, ..with_partials(call.params_for(few + 1, UNLIMITED)) };
    let prefill_parameter = PrefillParameter { prefill, problem, attention: long, next_tile };
    let parameter = Parameter::Fused(Box::new(FusedParameter { prefill: prefill_parameter, decode: short }));
    let variant = variants::find(KERNEL, &[variants::dtype_value(problem.q.dtype), prefill.tile.head_dim])?;
    // One CTA per SM; the CTAs derive from the batch how many of them decode.
    let shared_memory = tile.shared_bytes.max(prefill.tile.shared_bytes);
    let config = LaunchConfig { grid: [device.sms, 1, 1], threads: tile.threads(), shared_memory };
    let counters = Counters { next_tile, count: 1 + split.num_split_records() as usize * problem.num_kv_heads };
    let launch = Launch { counters, ..Launch::new(KERNEL, variant, config, parameter) };
    Ok(Some(Launches { list: vec![launch], store_new_tokens: false }))
}

/// The inputs of the kernel's parameter, which is encoded at the launch.
pub(super) struct FusedParameter<'c> {
    pub(super) prefill: PrefillParameter<'c>,
    pub(super) decode: AttentionParams,
}

impl FusedParameter<'_> {
    pub(super) fn params(&self) -> Result<HopperFusedParams> {
        let PrefillParameter { prefill, problem, .. } = &self.prefill;
        let map = |view| prefill.key_map(problem, view, problem.head_dim, i64::from(TOKENS_PER_LOAD));
        let [k, v] = [map(&problem.k)?, map(&problem.v)?];
        Ok(HopperFusedParams { prefill: self.prefill.params()?, k, v, decode: self.decode })
    }
}

/// The tile shapes of prefill and decode, if the kernel takes the call.
fn tiles(call: &Call) -> Option<(HopperPrefill, &'static AttentionTile)> {
    let Call { problem, device, .. } = call;
    let has_enough_prefill = call.rows() > ROWS_PER_SEQUENCE * call.max_short_queries() * call.seqs();
    if problem.batch_invariant || call.are_all_long() || !has_enough_prefill {
        return None;
    }
    let tile = AttentionTile::smallest(problem, "fused")?;
    let is_built = [problem.head_dim, problem.value_dim] == [tile.head_dim as usize; 2] && !transforms_logits(problem);
    let loads_fit = matches!(problem.keys.storage,
        KeyStorage::Paged(table) if table.page_size.is_multiple_of(TOKENS_PER_LOAD as usize));
    let fits = tile.shared_bytes <= device.shared_memory && problem.num_kv_heads <= device.sms as usize;
    if !(is_built && loads_fit && fits) {
        return None;
    }
    let prefill = call.hopper_prefill().filter(|prefill| prefill.loads_kv_by_tma(problem))?;
    Some((prefill, tile))
}

#[cfg(test)]
mod tests {
    use super::super::LaunchPlan;
    use super::super::hopper::tests::{paged, ragged};
    use super::super::tests::{device, named_on};
    use super::*;
    use crate::problem::attention::{Attention, Keys, Queries};
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
    fn sequences_that_are_all_long_need_no_decode() {
        let of = |rows: usize, longest: usize| {
            let plain = with_workspace(&paged(16));
            Attention { num_rows: rows, queries: Queries { longest, ..plain.queries }, ..plain }
        };
        let prefill = [("hopper_prefill_bf16_128_paged_none", 1, i32::MAX)];
        assert_eq!(names(&of(7 * 100, 100)), prefill);
        let fused = [("hopper_fused_bf16_128", 1, i32::MAX)];
        for problem in [of(7 * 100 - 1, 100), of(7 * 100, 101), of(7 * 100, 0)] {
            assert_eq!(names(&problem), fused);
        }
        let invariant = Attention { batch_invariant: true, ..of(7 * 100, 100) };
        assert_eq!(names(&invariant).len(), 2);
    }

    #[test]
    fn short_and_long_sequences_take_the_fused_kernel() {
        let fused = [("hopper_fused_bf16_128", 1, i32::MAX)];
        for page_size in [16, 48, 256] {
            assert_eq!(names(&with_workspace(&paged(page_size))), fused);
        }
        let few_rows = Attention { num_rows: 2 * 2 * 7, ..paged(16) };
        assert_eq!(names(&with_workspace(&Attention { num_rows: 29, ..few_rows })), fused);
        let mut capped = paged(16);
        capped.score.softcap = 30.0;
        let many_heads = Attention { num_kv_heads: 133, num_q_heads: 133, ..paged(16) };
        let invariant = Attention { batch_invariant: true, ..paged(16) };
        let storage = KeyStorage::Contiguous { total: 4096 };
        let contiguous = Attention { keys: Keys { storage, ..ragged().keys }, ..ragged() };
        for problem in [few_rows, capped, many_heads, invariant, paged(8), paged(24), contiguous] {
            assert_eq!(names(&with_workspace(&problem)).len(), 2);
        }
        assert_eq!(names(&paged(16)).len(), 2);
    }

    #[test]
    fn partials_follow_the_tile_counter() {
        let problem = with_workspace(&paged(16));
        let plan = LaunchPlan::on(&problem, None, device(true)).expect("the sizes are allowed");
        let fused = &plan.0.list[0];
        let Parameter::Fused(of) = &fused.parameter else { unreachable!() };
        let FusedParameter { prefill, decode } = &**of;
        assert_eq!((fused.counters.next_tile as usize, prefill.next_tile as usize), (1 << 20, 1 << 20));
        let taken = (1 + device(true).sms as usize) * COUNTER_BYTES;
        let partials = ((1 << 20) + taken).next_multiple_of(64);
        assert_eq!((decode.partial.split_records as usize, decode.partial.num_ranges), (partials, 66));
        // An arrival counter for each of two KV heads and every boundary.
        assert_eq!(fused.counters.count, 1 + 2 * 65);
    }
}
