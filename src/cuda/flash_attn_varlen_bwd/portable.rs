//! The portable backward kernels, for every GPU, dtype, head dimension and logits transform: one for dQ, one for dK and dV.
//!
//! `attention_bwd_dq` comes first: it stores delta of each query row in the workspace for the others, if that has room. With a bias,
//! `attention_bwd_delta` may do that instead.

use super::bias::DsPlaces;
use super::row_blocks::RowBlocks;
use super::{Launch, Parameter, bias, score_gradients, sinks};
use crate::cuda::attention::tiles::transforms_logits;
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::attention_bwd::BackwardParams;
use crate::cuda::params::bias::{BiasBackwardParams, DQ_FROM_DS_ROWS, ScoreGradients};
use crate::cuda::params::key_ranges::{KeyRangeBackwardParams, KeyRangeSource};
use crate::cuda::tiles::{ATTENTION_BWD, AttentionBwdTile};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::{Attention, Bias};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use std::ptr::null_mut;
use std::rc::Rc;

const QUERY_KERNEL: &str = "attention_bwd_dq";
const KEY_KERNEL: &str = "attention_bwd_dkdv";

/// How the shapes of tiles begin that serve only calls that no other shape serves.
const OWN_SHAPES: [&str; 2] = ["key_ranges", "bias"];

/// The shapes for a bias whose rows begin with chunks of 16 bytes, and for others if dS is stored; then those for a bias of f32 beside
/// 16-bit operands if dS is stored: whose rows begin with chunks; whose dS is stored in the workspace, or is the gradient of the bias.
/// Other shapes serve them too.
const ALIGNED_BIAS: &str = "bias_aligned";
const SHIFTED_BIAS: &str = "bias_shifted";
const ALIGNED_F32_BIAS: &str = "bias_f32_aligned";
const F32_BIAS: &str = "bias_f32";
/// How the shapes of the last one begin.
const OWN_F32_BIAS: &str = "bias_f32_own";

/// The shape of the tiles for a call with bounds of rows or with a bias.
fn own_shape(forward: &Attention) -> Option<&'static str> {
    let has = [!forward.queries.key_ranges.is_none(), forward.score.bias.is_some()];
    OWN_SHAPES.into_iter().zip(has).find_map(|(shape, has)| has.then_some(shape))
}

/// The place of delta `[Hq, Tq]` in the workspace; null if the workspace is too small.
fn delta(problem: &FlashAttnVarlenBwd) -> *mut f32 {
    let Some(workspace) = &problem.workspace else { return null_mut() };
    let padding = workspace.data.align_offset(align_of::<f32>());
    let needed = size_of::<f32>() * problem.forward.num_q_heads * problem.forward.num_rows;
    let available = problem.workspace_bytes().checked_sub(padding);
    if available.is_some_and(|available| available >= needed) {
        workspace.data.wrapping_add(padding).cast()
    } else {
        null_mut()
    }
}

impl AttentionBwdTile {
    /// Rows that a CTA holds: packed query rows (dQ) or keys (dK and dV).
    fn held(&self) -> usize {
        (16 * self.row_tiles * self.row_warps) as usize
    }

    fn threads(&self) -> u32 {
        32 * self.row_warps * self.column_warps
    }

    /// Shared memory of a launch: what `shared_bytes` has for a staged bias is for elements of q's type, except in shapes that store dS,
    /// which have a place for a bias of f32 or take none.
    fn bytes_for(&self, forward: &Attention) -> u32 {
        let adds_bytes = self.stages_bias && !self.stores_ds;
        let Some(bias) = forward.score.bias.as_ref().filter(|_| adds_bytes) else { return self.shared_bytes };
        let pairs = self.stages * self.held() as u32 * self.block;
        self.shared_bytes + pairs * (bias.dtype.size() as u32 - self.bytes)
    }
}

/// The variant of `kernel` for a call and its tile: among those of the smallest sufficient head dimension the first one of
/// the table that fits the device, without a logits transform if the call has none and such a variant is built. `bias_shape` may be one
/// of those for the rows of the bias.
fn variant(
    forward: &Attention,
    bias_shape: Option<&str>,
    device: &Device,
    kernel: &str,
    gradient: &str,
) -> Result<(usize, &'static AttentionBwdTile)> {
    let (dtype, dim) = (forward.q.dtype, forward.head_dim.max(forward.value_dim));
    let tiles = ATTENTION_BWD.iter().filter(|t| t.gradient == gradient && t.bytes as usize == dtype.size());
    let own = own_shape(forward);
    let tiles = tiles.filter(|t| own == OWN_SHAPES.into_iter().find(|shape| t.shape.starts_with(shape)));
    let takes = |shape: &str| {
        let is_own_f32 = shape.starts_with(OWN_F32_BIAS);
        let is_special = is_own_f32 || [ALIGNED_BIAS, SHIFTED_BIAS, ALIGNED_F32_BIAS, F32_BIAS].contains(&shape);
        !is_special || bias_shape == Some(if is_own_f32 { OWN_F32_BIAS } else { shape })
    };
    let tiles = tiles.filter(|t| t.head_dim as usize >= dim && takes(t.shape));
    let needed = tiles.clone().map(|t| t.bytes_for(forward)).min().unwrap_or(0);
    let tiles = tiles.filter(|t| t.bytes_for(forward) <= device.shared_memory);
    let bucket = tiles.clone().map(|t| t.head_dim).min();
    let transforms: &[&str] = if transforms_logits(forward) { &["softcap_alibi"] } else { &["none", "softcap_alibi"] };
    tiles
        .filter(|t| Some(t.head_dim) == bucket)
        .flat_map(|t| transforms.iter().map(move |logits| (t, *logits)))
        .find_map(|(t, logits)| {
            let values = [variants::dtype_value(dtype), t.head_dim_value, t.shape, logits];
            Some((variants::find(kernel, &values).ok()?, t))
        })
        .ok_or_else(|| {
            Error::unimplemented(if needed > device.shared_memory {
                let available = device.shared_memory;
                format!("{kernel} for {dtype} and head dimension {dim} needs {needed} bytes of shared memory; this GPU has {available}")
            } else {
                format!("no kernel {kernel} is built for {dtype} and head dimension {dim}")
            })
        })
}

/// The launch that computes a gradient of blocks of rows per KV head; `None` if there are no rows.
fn gradient_launch<'p>(
    problem: &FlashAttnVarlenBwd,
    device: &Device,
    (gradient, bias_shape): (&'static str, Option<&str>),
    blocks: RowBlocks,
    parameter: Parameter<'p>,
) -> Result<Option<Launch<'p>>> {
    let forward = &problem.forward;
    let kernel = if gradient == "dq" { QUERY_KERNEL } else { KEY_KERNEL };
    let (variant, tile) = variant(forward, bias_shape, device, kernel, gradient)?;
    let ctas = blocks.count(tile.held()) as u64 * forward.num_kv_heads as u64;
    if ctas > i32::MAX as u64 {
        return Err(Error::unimplemented(format!("{gradient} takes {ctas} blocks; a grid has up to 2^31 - 1")));
    }
    let shared_memory = tile.bytes_for(forward);
    let config = LaunchConfig { grid: [ctas as u32, 1, 1], threads: tile.threads(), shared_memory };
    Ok((ctas > 0).then(|| Launch::new(kernel, variant, config, parameter)))
}

/// The CTAs that run at a time.
fn places(device: &Device, ctas_per_sm: u32) -> usize {
    (device.sms * ctas_per_sm) as usize
}

/// Where the kernel for dK and dV can store dS of a call with a bias.
fn places_of_ds(forward: &Attention, bias: &Bias, device: &Device) -> Result<DsPlaces> {
    if bias.dtype == forward.q.dtype {
        let stores_ds = key_tile(forward, Some(SHIFTED_BIAS), device)?.stores_ds;
        return Ok(DsPlaces { gradient: stores_ds, workspace: stores_ds });
    }
    let [own, summed] = [false, true].map(|is_summed| f32_bias_shape(forward, bias, is_summed, device));
    let (own, summed) = (own?, summed?);
    Ok(DsPlaces {
        gradient: key_tile(forward, Some(own), device)?.shape.starts_with(own),
        workspace: key_tile(forward, Some(summed), device)?.stores_ds,
    })
}

/// The tile of dK and dV, as `variant` finds it.
fn key_tile(forward: &Attention, bias_shape: Option<&str>, device: &Device) -> Result<&'static AttentionBwdTile> {
    Ok(variant(forward, bias_shape, device, KEY_KERNEL, "dkdv")?.1)
}

/// The shape for a bias of f32 beside 16-bit operands whose dS is stored: in the workspace, to be summed, or as the gradient.
fn f32_bias_shape(forward: &Attention, bias: &Bias, is_summed: bool, device: &Device) -> Result<&'static str> {
    let is_aligned = bias.keys.is_multiple_of(4);
    if is_aligned && key_tile(forward, Some(ALIGNED_F32_BIAS), device)?.shape == ALIGNED_F32_BIAS {
        return Ok(ALIGNED_F32_BIAS);
    }
    Ok(if is_summed { F32_BIAS } else { OWN_F32_BIAS })
}

/// The launches of a call; never `None`, because these kernels support every call.
pub(super) fn launches<'p>(problem: &'p FlashAttnVarlenBwd, device: Device) -> Result<Option<Vec<Launch<'p>>>> {
    let delta = delta(problem);
    let original = problem.forward.score.bias.as_ref();
    let places_of_ds =
        original.map(|bias| places_of_ds(&problem.forward, bias, &device)).transpose()?.unwrap_or_default();
    let copy = bias::copy(problem, places_of_ds, delta);
    // The call as the kernels for its gradients see it.
    let call = copy.map_or(*problem, |copy| bias::with_copy(problem, &copy));
    let ds = ScoreGradients::of(&call, places_of_ds, copy.as_ref(), delta);
    let (forward, ranges) = (&call.forward, &call.forward.queries.key_ranges);
    let all = [call.num_keys, forward.num_rows].map(RowBlocks::of_all);
    let [keys, queries] = original.map_or(all, |original| RowBlocks::of_bias(problem, original));
    let group = forward.num_q_heads / forward.num_kv_heads;
    let query_shape = forward.score.bias.as_ref().filter(|of| bias::is_aligned(&call, of)).map(|_| ALIGNED_BIAS);
    let key_shape = match original.filter(|_| ds.are_stored() && query_shape.is_none()) {
        Some(bias) if bias.dtype == forward.q.dtype => Some(SHIFTED_BIAS),
        Some(bias) => Some(f32_bias_shape(forward, bias, ds.are_summed(), &device)?),
        None => query_shape,
    };
    let backward = BackwardParams::new(&call, &device, delta)?;
    let dq_tile = ds.are_stored().then(|| score_gradients::dq_tile(forward, &ds)).transpose()?;
    let parameter = if let Some((of, original)) = forward.score.bias.as_ref().zip(original) {
        let tile = key_tile(forward, key_shape, &device)?;
        let keys_per_turn = keys.per_turn(forward, tile.held(), places(&device, tile.ctas_per_sm));
        let queries_per_turn = dq_tile.map_or(1, |tile| {
            let places = (places(&device, tile.ctas_per_sm) / tile.parts as usize).max(1);
            queries.packed(group).per_turn(forward, DQ_FROM_DS_ROWS as usize, places)
        });
        Parameter::Bias(Rc::new(BiasBackwardParams {
            dbias_keys: original.keys as i32,
            key_period: keys.period as i32,
            query_period: queries.period as i32,
            key_blocks_per_turn: keys_per_turn as i32,
            query_blocks_per_turn: queries_per_turn as i32,
            ..bias::params(&call, of, &backward, ds, &device)?
        }))
    } else if ranges.is_none() {
        Parameter::Portable(Rc::new(backward))
    } else {
        Parameter::KeyRanges(Rc::new(KeyRangeBackwardParams { backward, ranges: KeyRangeSource::new(ranges) }))
    };
    let [clearing, summing] = bias::launches(&call, &device, &backward, ds, &parameter)?;
    let all_rows = all[1].packed(group);
    let dq = gradient_launch(&call, &device, ("dq", query_shape), all_rows, parameter.clone())?;
    let dkdv = gradient_launch(&call, &device, ("dkdv", key_shape), keys, parameter.clone())?;
    let copying = copy.map(|copy| copy.copy_launch(Parameter::CopyRows)).transpose()?.flatten();
    let dq_from_ds =
        dq_tile.map(|tile| score_gradients::dq_launch(forward, tile, queries.packed(group), parameter.clone()));
    let gradients = [dq, dkdv, dq_from_ds.transpose()?.flatten(), summing];
    // Where dQ is computed from dS, the kernel for dQ computes delta only if it has sequences with pairs past the bias.
    let stores_delta = ds.are_stored() && !backward.delta.is_null();
    let delta = stores_delta.then(|| bias::delta_launch(forward, parameter.clone())).transpose()?.flatten();
    let before = [copying, clearing, delta];
    let launches = before.into_iter().chain(gradients).chain([sinks(problem, parameter)?]);
    Ok(Some(launches.flatten().collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::attention::tests::{device, problem};
    use crate::cuda::flash_attn_varlen_bwd::hopper::tests::gradients;
    use crate::problem::Op;
    use crate::problem::attention::{Bias, KeyRanges, Queries, Score};
    use crate::problem::workspace::{AttentionSizes, BiasSizes};
    use crate::tensor::{DType, Tensor};

    const KERNELS: [(&str, &str); 2] = [(QUERY_KERNEL, "dq"), (KEY_KERNEL, "dkdv")];

    #[test]
    fn every_head_dimension_finds_a_kernel_on_every_gpu() {
        let plain = problem(64, 1, 8, 64);
        for (dtype, shared_memory, capped) in [DType::F32, DType::F16, DType::BF16]
            .iter()
            .flat_map(|dtype| [99, 163, 227].map(|kilobytes| (*dtype, kilobytes * 1024)))
            .flat_map(|(dtype, bytes)| [false, true].map(|capped| (dtype, bytes, capped)))
        {
            let device = Device { shared_memory, ..device(false) };
            let softcap = if capped { 1.0 } else { 0.0 };
            let attention = Attention {
                q: Tensor { dtype, ..plain.q },
                kv_dtype: dtype,
                score: Score { softcap, ..plain.score },
                ..plain
            };
            let bound = KeyRanges { start: Some(std::ptr::dangling()), end: None };
            let bias = Bias { data: std::ptr::null(), dtype: DType::F32, seqs: 1, heads: 1, rows: 9, keys: 9 };
            let plain = (8..=512).step_by(8).map(|dim| (dim, KeyRanges::NONE, None));
            let options = [(bound, None), (KeyRanges::NONE, Some(bias))];
            let optional = (8..=512).step_by(8).flat_map(|dim| options.map(|(ranges, bias)| (dim, ranges, bias)));
            for (dim, key_ranges, bias) in plain.chain(optional) {
                // Such rows do not fit; see the test below.
                if dtype == DType::F32 && dim > 256 && shared_memory < 128 * 1024 {
                    continue;
                }
                for (head_dim, value_dim) in [(dim, 8), (8, dim)] {
                    for (kernel, gradient) in KERNELS {
                        let queries = Queries { key_ranges, ..attention.queries };
                        let score = Score { bias, ..attention.score };
                        let problem = Attention { queries, score, head_dim, value_dim, ..attention };
                        let (found, tile) =
                            variant(&problem, None, &device, kernel, gradient).expect("there is a kernel");
                        assert!(tile.head_dim as usize >= dim && tile.shared_bytes <= shared_memory, "{tile:?}");
                        let name = variants::VARIANTS[found].name;
                        assert!(!capped || name.ends_with("_softcap_alibi"), "{name}");
                        assert_eq!(name.contains("key_ranges"), !key_ranges.is_none(), "{name}");
                        assert_eq!(name.contains("_bias"), bias.is_some(), "{name}");
                    }
                }
            }
        }
    }

    #[test]
    fn an_aligned_bias_of_16_bits_has_kernels_of_its_own_up_to_128_columns_without_a_soft_cap() {
        let plain = problem(64, 1, 8, 64);
        let bias = Bias { data: std::ptr::null(), dtype: plain.q.dtype, seqs: 1, heads: 1, rows: 8, keys: 8 };
        let shape = |head_dim, softcap, bias_shape| {
            let problem = Attention { score: Score { bias: Some(bias), softcap, ..plain.score }, head_dim, ..plain };
            let device = Device { shared_memory: 99 * 1024, ..device(false) };
            KERNELS.map(|(kernel, gradient)| {
                variant(&problem, bias_shape, &device, kernel, gradient).expect("there is a kernel").1.shape
            })
        };
        assert_eq!(shape(64, 0.0, Some(ALIGNED_BIAS)), [ALIGNED_BIAS; 2]);
        assert_eq!(shape(128, 0.0, Some(ALIGNED_BIAS)), [ALIGNED_BIAS; 2]);
        assert_eq!(shape(128, 0.0, Some(SHIFTED_BIAS)), ["bias", SHIFTED_BIAS]);
        assert_eq!(shape(128, 0.0, None), ["bias"; 2]);
        assert_eq!(shape(128, 1.0, Some(ALIGNED_BIAS)), ["bias"; 2]);
        assert_eq!(shape(192, 0.0, Some(ALIGNED_BIAS)), ["bias"; 2]);
    }

    #[test]
    fn a_bias_of_f32_has_shapes_for_rows_that_begin_with_chunks_where_they_fit() {
        let plain = problem(64, 1, 8, 64);
        let shape = |keys, kilobytes: u32, is_summed| {
            let bias = Bias { data: std::ptr::null(), dtype: DType::F32, seqs: 1, heads: 1, rows: 8, keys };
            let attention = Attention { score: Score { bias: Some(bias), ..plain.score }, ..plain };
            let device = Device { shared_memory: kilobytes * 1024, ..device(false) };
            let of_call = f32_bias_shape(&attention, &bias, is_summed, &device).expect("there is a kernel");
            key_tile(&attention, Some(of_call), &device).expect("there is a kernel").shape
        };
        assert_eq!([false, true].map(|is_summed| shape(12, 163, is_summed)), [ALIGNED_F32_BIAS; 2]);
        assert_eq!([false, true].map(|is_summed| shape(14, 163, is_summed)), [OWN_F32_BIAS, F32_BIAS]);
        assert_eq!([false, true].map(|is_summed| shape(12, 99, is_summed)), ["bias_f32_own_small", F32_BIAS]);
    }

    #[test]
    fn a_bias_of_odd_rows_is_copied_and_a_shared_one_is_summed_by_the_kernel_for_aligned_rows() {
        const BYTES: i64 = 1 << 16;
        const ALL: i64 = BYTES + 4 * 1000 * (24 + 8) * 2;
        let kernels = |bias: Bias, bytes: &'static [i64; 1], softcap| {
            let mut problem = gradients(128);
            problem.forward.score = Score { bias: Some(bias), softcap, ..problem.forward.score };
            problem.dbias = Some(Tensor::dense(bias.dtype, std::ptr::without_provenance_mut(0x1000), &[]));
            problem.workspace = Some(Tensor::dense(DType::U8, std::ptr::without_provenance_mut(0x1001), bytes));
            let launches = launches(&problem, device(false)).expect("there are kernels").expect("they take all calls");
            launches.iter().map(|launch| launch.kernel).collect::<Vec<_>>()
        };
        let own = Bias { data: std::ptr::null(), dtype: DType::BF16, seqs: 7, heads: 4, rows: 9, keys: 17 };
        let [aligned, shared] = [Bias { keys: 16, ..own }, Bias { seqs: 1, ..own }];
        let [copy, clear] = ["copy_bias_rows", "attention_bwd_dbias_clear"];
        let [dq, dkdv, from_ds] = ["attention_bwd_dq", "attention_bwd_dkdv", "attention_bwd_dq_from_ds"];
        let sums = "attention_bwd_dbias_aligned";
        let delta = "attention_bwd_delta";
        assert_eq!(kernels(own, &[BYTES], 0.0), [clear, delta, dq, dkdv, from_ds]);
        assert_eq!(kernels(aligned, &[BYTES], 0.0), [clear, delta, dq, dkdv, from_ds]);
        assert_eq!(kernels(shared, &[BYTES], 0.0), [copy, dq, dkdv, sums]);
        assert_eq!(kernels(Bias { keys: 24, ..shared }, &[BYTES], 0.0), [dq, dkdv, sums]);
        // With room for dS, after that for the copy.
        let sum = "attention_bwd_dbias_sum";
        assert_eq!(kernels(shared, &[ALL], 0.0), [copy, delta, dq, dkdv, from_ds, sum]);
        assert_eq!(kernels(Bias { keys: 24, ..shared }, &[ALL], 0.0), [delta, dq, dkdv, from_ds, sum]);
        assert_eq!(kernels(Bias { seqs: 7, heads: 1, ..shared }, &[ALL], 0.0), [copy, delta, dq, dkdv, from_ds, sum]);
        // Past the limit of dS.
        let wide = Bias { keys: 80_000, ..shared };
        assert_eq!(kernels(wide, &[1 << 30], 0.0), [dq, dkdv, sums]);
        assert_eq!(kernels(Bias { keys: 60_000, ..wide }, &[1 << 30], 0.0), [delta, dq, dkdv, from_ds, sum]);
        // Without room for the copy, or for delta, and where the other kernels are not built for it.
        let general = "attention_bwd_dbias";
        assert_eq!(kernels(own, &[16_003], 0.0), [clear, delta, dq, dkdv, from_ds]);
        assert_eq!(kernels(own, &[16_002], 0.0), [clear, dq, dkdv, from_ds]);
        assert_eq!(kernels(shared, &[16_003], 0.0), [dq, dkdv, general]);
        assert_eq!(kernels(Bias { keys: 24, ..shared }, &[16_002], 0.0), [dq, dkdv, general]);
        assert_eq!(kernels(shared, &[BYTES], 1.0), [dq, dkdv, general]);
        assert_eq!(kernels(Bias { dtype: DType::F32, ..shared }, &[BYTES], 0.0), [dq, dkdv, general]);
        assert_eq!(kernels(Bias { dtype: DType::F32, ..shared }, &[ALL], 0.0), [delta, dq, dkdv, from_ds, sum]);
        assert_eq!(kernels(Bias { dtype: DType::F32, ..own }, &[BYTES], 0.0), [clear, delta, dq, dkdv, from_ds]);
    }

    #[test]
    fn past_128_columns_ds_is_stored_and_past_256_by_large_tiles_alone() {
        /// What the front-ends allocate for a call.
        fn recommended(forward: &Attention, bias: &Bias) -> i64 {
            let Attention { num_q_heads, num_kv_heads, head_dim, value_dim, .. } = *forward;
            let [num_q_heads, num_kv_heads, head_dim, value_dim, rows] =
                [num_q_heads, num_kv_heads, head_dim, value_dim, forward.num_rows].map(|size| size as i64);
            let dtype = forward.q.dtype;
            let sizes =
                AttentionSizes { num_q_heads, num_kv_heads, head_dim, value_dim, dtype, batch_invariant: false };
            let (plain, keys) = (sizes.gradients_workspace(), bias.keys as i64);
            let is_shared = bias.is_shared(forward.max_seqs, forward.num_q_heads);
            let (dtype, bias_rows) = (bias.dtype, bias.all_rows() as i64);
            let of_bias = BiasSizes { keys, dtype, is_shared, is_masked: false, has_gradient: true, rows, bias_rows };
            let more = sizes.bias_workspace(Op::FlashAttnVarlenBwd, of_bias);
            plain.fixed + plain.per_row * rows + plain.per_sequence * 7 + more.fixed + more.per_bias_row * bias_rows
        }
        // With the tiles of dQ, dK and dV for GPUs of 99 KB, and with the large ones.
        let both = |head_dim, bias: Bias, bytes: Option<i64>, softcap| {
            let mut problem = gradients(head_dim);
            problem.forward.score = Score { bias: Some(bias), softcap, ..problem.forward.score };
            let dims = [bytes.unwrap_or_else(|| recommended(&problem.forward, &bias))];
            problem.dbias = Some(Tensor::dense(bias.dtype, std::ptr::without_provenance_mut(0x1000), &[]));
            problem.workspace = Some(Tensor::dense(DType::U8, std::ptr::without_provenance_mut(0x1001), &dims));
            [99, 227].map(|kilobytes| {
                let device = Device { shared_memory: kilobytes * 1024, ..device(false) };
                let launches = launches(&problem, device).expect("there are kernels").expect("they take all calls");
                launches.iter().map(|launch| launch.kernel).collect::<Vec<_>>()
            })
        };
        let kernels = |head_dim, bias, bytes, softcap| {
            let [small, large] = both(head_dim, bias, bytes, softcap);
            assert!(small == large || head_dim > 256);
            large
        };
        let own = Bias { data: std::ptr::null(), dtype: DType::BF16, seqs: 7, heads: 4, rows: 9, keys: 16 };
        let [shared, odd] = [Bias { seqs: 1, ..own }, Bias { keys: 17, ..own }];
        let odd_shared = Bias { keys: 17, ..shared };
        let [copy, clear, delta] = ["copy_bias_rows", "attention_bwd_dbias_clear", "attention_bwd_delta"];
        let [dq, dkdv, from_ds] = ["attention_bwd_dq", "attention_bwd_dkdv", "attention_bwd_dq_from_ds"];
        let [sum, general] = ["attention_bwd_dbias_sum", "attention_bwd_dbias"];
        for head_dim in [136, 192, 256, 264, 512] {
            assert_eq!(kernels(head_dim, own, None, 0.0), [clear, delta, dq, dkdv, from_ds]);
            assert_eq!(kernels(head_dim, odd, None, 0.0), [clear, delta, dq, dkdv, from_ds]);
            assert_eq!(kernels(head_dim, shared, None, 0.0), [delta, dq, dkdv, from_ds, sum]);
            assert_eq!(kernels(head_dim, odd_shared, None, 0.0), [copy, delta, dq, dkdv, from_ds, sum]);
            // With room for a copy, but not for dS.
            for bias in [shared, odd_shared] {
                assert_eq!(kernels(head_dim, bias, Some(1 << 16), 0.0), [dq, dkdv, general]);
            }
            assert_eq!(kernels(head_dim, own, None, 1.0), [dq, dkdv, general]);
        }
        for head_dim in [64, 128, 192, 256, 512] {
            for bias in [own, odd, shared, odd_shared].map(|bias| Bias { dtype: DType::F32, ..bias }) {
                let is_gradient = head_dim <= 128 && bias.seqs == 7;
                let [small, large] = both(head_dim, bias, None, 0.0);
                let stored = if is_gradient {
                    vec![clear, delta, dq, dkdv, from_ds]
                } else {
                    vec![delta, dq, dkdv, from_ds, sum]
                };
                assert_eq!(large, stored, "{head_dim}");
                // The own shape of f32 at 128 columns has no room there, nor have the large tiles.
                let is_stored = head_dim < 128 || (128..512).contains(&head_dim) && !is_gradient;
                assert_eq!(small == stored, is_stored, "{head_dim}: {small:?}");
            }
        }
        for bias in [own, odd] {
            assert_eq!(both(264, bias, None, 0.0)[0], [clear, dq, dkdv]);
        }
        for bias in [shared, odd_shared] {
            assert_eq!(both(264, bias, None, 0.0)[0], [dq, dkdv, general]);
        }
    }

    #[test]
    fn rows_that_do_not_fit_the_gpu_are_refused() {
        let plain = problem(64, 1, 8, 264);
        let problem = Attention { q: Tensor { dtype: DType::F32, ..plain.q }, kv_dtype: DType::F32, ..plain };
        let device = Device { shared_memory: 99 * 1024, ..device(false) };
        let error = variant(&problem, None, &device, KERNELS[0].0, KERNELS[0].1).expect_err("they do not fit");
        let expected =
            "attention_bwd_dq for f32 and head dimension 264 needs 131432 bytes of shared memory; this GPU has 101376";
        assert!(error.to_string().contains(expected), "{error}");
    }

    #[test]
    fn the_kernel_without_a_logits_transform_is_preferred() {
        let named = |head_dim, kilobytes: u32, gradient| {
            let problem = problem(64, 1, 8, head_dim);
            let device = Device { shared_memory: kilobytes * 1024, ..device(false) };
            let (kernel, gradient) = KERNELS[usize::from(gradient)];
            variants::VARIANTS[variant(&problem, None, &device, kernel, gradient).expect("there is a kernel").0].name
        };
        assert_eq!(named(128, 99, false), "attention_bwd_dq_bf16_128_small_none");
        assert_eq!(named(64, 99, true), "attention_bwd_dkdv_bf16_64_small_none");
        assert_eq!(named(96, 99, true), "attention_bwd_dkdv_bf16_96_small_none");
        assert_eq!(named(192, 99, false), "attention_bwd_dq_bf16_192_small_none");
        assert_eq!(named(256, 163, true), "attention_bwd_dkdv_bf16_256_large_none");
        assert_eq!(named(256, 99, true), "attention_bwd_dkdv_bf16_256_small_softcap_alibi");
        assert_eq!(named(264, 227, false), "attention_bwd_dq_bf16_512_large_none");
        assert_eq!(named(512, 163, true), "attention_bwd_dkdv_bf16_512_small_softcap_alibi");
        let with_bias = |head_dim, kilobytes: u32, softcap, gradient| {
            let plain = problem(64, 1, 8, head_dim);
            let bias = Bias { data: std::ptr::null(), dtype: plain.q.dtype, seqs: 1, heads: 1, rows: 8, keys: 8 };
            let problem = Attention { score: Score { bias: Some(bias), softcap, ..plain.score }, ..plain };
            let device = Device { shared_memory: kilobytes * 1024, ..device(false) };
            let (kernel, gradient) = KERNELS[usize::from(gradient)];
            variants::VARIANTS[variant(&problem, None, &device, kernel, gradient).expect("there is a kernel").0].name
        };
        assert_eq!(with_bias(256, 227, 0.0, true), "attention_bwd_dkdv_bf16_256_bias_large_none");
        assert_eq!(with_bias(256, 227, 1.0, true), "attention_bwd_dkdv_bf16_256_bias_large_softcap_alibi");
        assert_eq!(with_bias(256, 99, 0.0, true), "attention_bwd_dkdv_bf16_256_bias_softcap_alibi");
        for (gradient, kernel) in [(false, QUERY_KERNEL), (true, KEY_KERNEL)] {
            assert_eq!(with_bias(512, 227, 0.0, gradient), format!("{kernel}_bf16_512_bias_large_none"));
            assert_eq!(with_bias(512, 227, 1.0, gradient), format!("{kernel}_bf16_512_bias_softcap_alibi"));
            assert_eq!(with_bias(512, 163, 0.0, gradient), format!("{kernel}_bf16_512_bias_softcap_alibi"));
        }
    }
}
