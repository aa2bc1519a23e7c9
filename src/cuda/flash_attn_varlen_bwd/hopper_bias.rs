//! What Hopper's gradients up to 128 columns need besides for a bias of pairs of rows and keys: which biases their kernels
//! take, the tensor maps, the parameter, and the kernel for the gradient of a bias that sequences or heads share.

use super::deferred::defer_params;
use super::tensor_maps::TensorMapConfig;
use super::{Launch, Parameter, bias};
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchAttributes;
use crate::cuda::padded_bias::PaddedBias;
use crate::cuda::params::attention_bwd::BackwardParams;
use crate::cuda::params::bias::BiasSource;
use crate::cuda::params::hopper_bwd::{HopperBackwardParams, HopperBiasBackwardParams, HopperDbiasParams};
use crate::cuda::tensor_map::TensorMap;
use crate::cuda::tiles::{HOPPER_BWD_DBIAS, HopperBwdDbiasTile};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::{Attention, Bias};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::problem::workspace::{BiasSizes, gradients_copy_bias, score_gradient_bytes};
use crate::tensor::DType;
use std::ptr::null_mut;

/// The call's bias, or its copy at `copy`, if the kernels take it and the gradient that `hopper_bwd` stores: of q's dtype or of
/// f32, and such that TMA supports them. `None` too where the portable kernels are faster.
pub(super) fn of(problem: &FlashAttnVarlenBwd, bias: &Bias, device: &Device, copy: *mut u8) -> Option<PaddedBias> {
    let forward = &problem.forward;
    if leaves_sms_idle(problem, bias, device) {
        return None;
    }
    let loaded = PaddedBias::new(bias, bias.dtype, Some(copy))?;
    let sizes = BiasSizes {
        keys: bias.keys as i64,
        dtype: bias.dtype,
        is_shared: bias.is_shared(forward.max_seqs, forward.num_q_heads),
        is_masked: forward.score.is_masked(),
        has_gradient: problem.dbias.is_some(),
        rows: forward.num_rows as i64,
        bias_rows: bias.all_rows() as i64,
    };
    let columns = forward.head_dim.max(forward.value_dim) as i64;
    let copies = gradients_copy_bias(columns, forward.num_q_heads as i64, &sizes);
    let supports = |dbias| loaded.supports_gradient(&dbias);
    ((copies || !loaded.is_copied()) && bias::stored_dbias(problem).is_none_or(supports)).then_some(loaded)
}

/// Whether the gradient of a bias that sequences or heads share has clusters for less than a third of the SMs, each with many items per
/// CTA, and the portable kernels can sum stored dS instead. On an H200 a CTA computes an item in one and a half to two microseconds: one matrix
/// for 64 sequences of 200 and 12 heads of 64, which has four tiles, takes 432 µs here and 295 by the portable kernels, one for 16 of 300, with
/// nine tiles, 155 and 173.
fn leaves_sms_idle(problem: &FlashAttnVarlenBwd, bias: &Bias, device: &Device) -> bool {
    /// Items per CTA from which on few clusters are too few.
    const MANY_ITEMS: usize = 32;
    if problem.dbias.is_none() || bias::stored_dbias(problem).is_some() {
        return false;
    }
    let Attention { num_q_heads, num_rows, .. } = problem.forward;
    let ds_bytes = score_gradient_bytes(num_q_heads, num_rows, bias.keys);
    let stores_ds = ds_bytes.is_some_and(|bytes| bytes <= problem.workspace_bytes());
    let DbiasWork { tiles, items } = DbiasWork::of(problem, bias);
    stores_ds && items > MANY_ITEMS * MAX_CLUSTER && tiles.saturating_mul(3 * MAX_CLUSTER) < device.sms as usize
}

/// Bytes of a line of L2.
const LINE_BYTES: usize = 128;

/// The parameter of `hopper_bwd_*_bias`.
pub(super) fn params(
    problem: &FlashAttnVarlenBwd,
    loaded: &PaddedBias,
    queries: u32,
    common: &HopperBackwardParams,
) -> Result<HopperBiasBackwardParams> {
    let bias = &loaded.bias;
    let BiasSource { seq_matrices, head_matrices, .. } = BiasSource::new(bias, bias.dtype.size())?;
    let encode = |data| bias.tensor_map(data, i64::from(queries));
    let stored = bias::stored_dbias(problem);
    // In other rows boxes share lines, which L2 must keep until it has the whole line. One matrix for all sequences and heads stays in L2.
    let has_whole_lines = (bias.keys * bias.dtype.size()).is_multiple_of(LINE_BYTES);
    Ok(HopperBiasBackwardParams {
        common: *common,
        bias: encode(bias.data)?,
        dbias: stored.map_or(Ok(TensorMap::NONE), |dbias| encode(loaded.gradient_place(&dbias)))?,
        dbias_data: stored.map_or(null_mut(), |dbias| loaded.gradient_place(&dbias).cast()),
        rows: bias.rows as i32,
        keys: bias.keys as i32,
        seq_matrices,
        head_matrices,
        stores_dbias: i32::from(stored.is_some()),
        evicts_bias_first: i32::from(has_whole_lines && seq_matrices + head_matrices > 0),
        evicts_dbias_first: i32::from(has_whole_lines),
        reserved: 0,
    })
}

/// The launches that a bias takes before and after the others: `hopper_bwd_prepare` stores `delta` and the lse in base 2.
pub(super) fn launches<'p>(
    problem: &'p FlashAttnVarlenBwd,
    loaded: &PaddedBias,
    device: Device,
    row_stats: [*mut f32; 2],
) -> Result<[Option<Launch<'p>>; 2]> {
    let before = loaded.copy_launch(Parameter::CopyRows)?;
    let after = match bias::stored_dbias(problem) {
        Some(dbias) => loaded.gradient_launch(&dbias, Parameter::CopyRows)?,
        None => dbias_launch(problem, loaded.bias, device, row_stats)?,
    };
    Ok([before, after])
}

const DBIAS_KERNEL: &str = "hopper_bwd_dbias";

/// Rows and keys of a tile of that kernel, and columns of a swizzle atom.
const DBIAS_TILE: i64 = 128;
const ATOM_COLUMNS: i64 = 64;

/// The most CTAs that share a tile. Of eight CTAs an H200 runs 13 clusters at a time, of six 16.
const MAX_CLUSTER: usize = 6;

/// What that kernel computes: tiles of all matrices, and in each the items, the sequences and heads that share it.
#[derive(Clone, Copy)]
struct DbiasWork {
    tiles: usize,
    items: usize,
}

impl DbiasWork {
    fn of(problem: &FlashAttnVarlenBwd, bias: &Bias) -> Self {
        let tiles = |len: usize| len.div_ceil(DBIAS_TILE as usize);
        let matrices = bias.seqs * bias.heads;
        let Attention { max_seqs, num_q_heads, .. } = problem.forward;
        Self {
            tiles: matrices.saturating_mul(tiles(bias.rows)).saturating_mul(tiles(bias.keys)),
            items: max_seqs.saturating_mul(num_q_heads) / matrices.max(1),
        }
    }

    /// The CTAs of a cluster that share the items of a tile, so that few tiles keep all SMs busy: those with which the last wave of
    /// clusters ends first.
    fn ctas_per_tile(self, device: &Device) -> usize {
        /// SMs of a GPC, which clusters do not leave.
        const GPC_SMS: usize = 16;
        /// What a CTA takes besides, alone and in a cluster, in items.
        const STARTS: [usize; 2] = [2, 6];
        let sms = device.sms as usize;
        let time = |ctas: &usize| {
            let (at_a_time, start) =
                if *ctas == 1 { (sms, STARTS[0]) } else { (sms / GPC_SMS * (GPC_SMS / ctas), STARTS[1]) };
            self.tiles.div_ceil(at_a_time.max(1)).saturating_mul(self.items.div_ceil(*ctas) + start)
        };
        (1..=MAX_CLUSTER).min_by_key(time).unwrap_or(1)
    }
}

/// The launch that computes the gradient of a bias that sequences or heads share, after `hopper_bwd_prepare`, which stores
/// `delta` and the lse in base 2.
fn dbias_launch<'p>(
    problem: &'p FlashAttnVarlenBwd,
    loaded: Bias,
    device: Device,
    [delta, lse_log2]: [*mut f32; 2],
) -> Result<Option<Launch<'p>>> {
    let (Some(dbias), Some(bias)) = (problem.dbias, problem.forward.score.bias) else { return Ok(None) };
    let dim = problem.forward.head_dim.max(problem.forward.value_dim);
    let of_type = if loaded.dtype == DType::F32 { "f32" } else { "16_bits" };
    let tile: &HopperBwdDbiasTile = HOPPER_BWD_DBIAS
        .iter()
        .find(|tile| tile.head_dim as usize >= dim && tile.bias == of_type)
        .ok_or_else(|| Error::internal(format!("{DBIAS_KERNEL} is not built for head dimension {dim}")))?;
    let work = DbiasWork::of(problem, &bias);
    let dtype = problem.forward.q.dtype;
    let variant = variants::find(DBIAS_KERNEL, &[variants::dtype_value(dtype), tile.head_dim_value, of_type])?;
    let parameter = defer_params(move || {
        let [q, k, v, dout, ..] = TensorMapConfig::all(problem, [DBIAS_TILE; 3], ATOM_COLUMNS);
        let encode = |config: TensorMapConfig| config.encode(problem);
        Ok(HopperDbiasParams {
            backward: BackwardParams::new(problem, &device, delta)?,
            q: encode(q)?,
            k: encode(k)?,
            v: encode(v)?,
            dout: encode(dout)?,
            bias: loaded.tensor_map(loaded.data, DBIAS_TILE)?,
            lse_log2,
            dbias: dbias.data.cast(),
            seqs: bias.seqs as i32,
            heads: bias.heads as i32,
            rows: bias.rows as i32,
            keys: bias.keys as i32,
            dbias_is_f32: i32::from(dbias.dtype == DType::F32),
            reserved: 0,
        })
    });
    let resources = [tile.threads, tile.shared_bytes];
    let launch = bias::launch(DBIAS_KERNEL, variant, work.tiles, resources, Parameter::HopperDbias(parameter))?;
    let cluster = work.ctas_per_tile(&device) as u32;
    // `hopper_bwd` lets it start when `hopper_bwd_prepare` has ended.
    Ok(launch.map(|mut launch| {
        launch.config.grid[1] = cluster;
        launch.attributes = LaunchAttributes { cluster, starts_early: true };
        launch
    }))
}
