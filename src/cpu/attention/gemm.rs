//! The GEMM-like path, for many query rows, as in prefill: a lane per row.
//!
//! Both products run through BLIS's micro-kernel (`cpu::micro_kernel`), which keeps MR x NR sums in registers. The
//! query rows lie in micro-panels of NR lanes (`softmax_state`). E is [`Simd::ELEMENTS_PER_LANE`]:
//!
//! ```text
//! scores [keys][NR]  = K [keys][D / E]        . q [D / E][NR]     MR keys per micro-kernel
//! o      [Dv][NR]   += Vt [Dv][keys / E]      . p [keys / E][NR]  MR columns of V per micro-kernel
//! ```
//!
//! K and V are the broadcast operands, so they need no transposition, and a query row stays in its lane, so the softmax
//! needs no sum across lanes. K and V of a block are packed once for all micro-panels (`packing`).

use super::block_rows::BLOCK;
use super::block_step::{BlockBuffers, BlockKernel, BlockStep};
use super::key_scales::KeyScales;
use super::packing::pack_block;
use super::prefetcher::Prefetcher;
use super::score::{KeyPositions, MaskAndBias};
use super::softmax::softmax;
use super::softmax_state::PANEL_VECTORS;
use crate::cpu::micro_kernel::{BroadcastOperand, VectorOperand, micro_kernel, store_rows};
use crate::cpu::simd::{MAX_LANES, Simd};
use std::ops::Range;

/// The kernel for [`super::plan::QueryLayout::RowsInLanes`].
pub(super) struct GemmKernel;

impl<S: Simd> BlockKernel<S> for GemmKernel {
    const PADDING: usize = 32;

    fn block_keys(_: usize) -> usize {
        BLOCK / 2 * S::ELEMENTS_PER_LANE
    }

    #[inline(always)]
    unsafe fn attend(simd: S, block_step: BlockStep, prefetcher: &mut Prefetcher, buffers: BlockBuffers) {
        let (lanes, rows) = (block_step.state.lanes, block_step.rows);
        let panels = lanes.div_ceil(PANEL_VECTORS * S::LANES);
        // Prefetches are spread over the micro-kernels: many at once would fill the CPU's miss buffers and stall it.
        let micro_kernels = (rows.block.len + block_step.dv).div_ceil(S::MR);
        let prefetch_bytes = prefetcher.bytes_per_call(panels * micro_kernels);
        // SAFETY: the caller guarantees readable rows, and state, lanes and buffers of the work tile's sizes. Each
        // panel is one or two whole vectors of the tile's lanes, and the block is packed before the first panel reads
        // it.
        unsafe {
            pack_block(simd, &block_step, buffers);
            let scales = block_step.scales.map(|from| KeyScales::load_per_key(from, buffers.scales));
            for panel in 0..panels {
                let lane = panel * PANEL_VECTORS * S::LANES;
                let prefetcher = (&mut *prefetcher, prefetch_bytes);
                match (lanes - lane > S::LANES, S::MR) {
                    (true, 4) => attend_panel::<S, 2, 4>(simd, &block_step, scales, lane, prefetcher, buffers),
                    (true, _) => attend_panel::<S, 2, 8>(simd, &block_step, scales, lane, prefetcher, buffers),
                    (false, 4) => attend_panel::<S, 1, 4>(simd, &block_step, scales, lane, prefetcher, buffers),
                    (false, _) => attend_panel::<S, 1, 8>(simd, &block_step, scales, lane, prefetcher, buffers),
                }
            }
        }
    }
}

/// Attention of the micro-panel of lanes from `lane` on to the block whose packed K and V are in the buffers.
///
/// # Safety
/// As [`BlockKernel::attend`]; `lane` is the first of a micro-panel of NV vectors.
#[inline(always)]
unsafe fn attend_panel<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    block_step: &BlockStep,
    scales: Option<KeyScales>,
    lane: usize,
    (prefetcher, prefetch_bytes): (&mut Prefetcher, usize),
    buffers: BlockBuffers,
) {
    let BlockStep { rows, state, d, dv, .. } = *block_step;
    let (width, first) = (NV * S::LANES, rows.block.first);
    let lanes = lane..lane + width;
    let visible = block_step.lanes.visible_to_any(&lanes, first, rows.block.len);
    if visible.is_empty() {
        return;
    }
    // Keys that share a lane are computed together.
    let keys =
        visible.start / S::ELEMENTS_PER_LANE * S::ELEMENTS_PER_LANE..visible.end.next_multiple_of(S::ELEMENTS_PER_LANE);
    let mask_and_bias = MaskAndBias {
        transform: block_step.transform,
        positions: KeyPositions { steps: keys.len(), first: keys.start, alternating: 1, stride: 1 },
        scales: scales.map(|scales| scales.without_first(keys.start)),
        lanes: block_step.lanes,
        lane,
        head: block_step.head,
        first,
        masked: !block_step.lanes.visible_to_all(&lanes, first, &keys),
    };
    // SAFETY: `keys` are keys of the block, and `lanes` are the NV vectors of this micro-panel: q, m, l and o of the
    // work tile have them.
    unsafe {
        let q = block_step.q.add(lane * d / S::ELEMENTS_PER_LANE);
        let depth = d / S::ELEMENTS_PER_LANE;
        let row_max = scores::<S, NV, MR>(simd, q, depth, &keys, (prefetcher, prefetch_bytes), buffers);
        let p = buffers.scores.add(keys.start * width);
        let mut rescale = [0.0f32; PANEL_VECTORS * MAX_LANES];
        for (v, row_max) in row_max.into_iter().enumerate() {
            simd.store(rescale.as_mut_ptr().add(v * S::LANES), row_max);
        }
        // The maximum is over whole micro-kernels; where these cover keys beyond `keys`, it has to be taken again.
        let row_max_known = keys.start.is_multiple_of(MR) && keys.end.is_multiple_of(MR);
        let state_vectors = (state.m.add(lane), state.l.add(lane));
        softmax::<S, NV>(simd, p, mask_and_bias, (S::LANES, row_max_known), state_vectors, rescale.as_mut_ptr());
        let o = state.o.add(lane * dv);
        values::<S, NV, MR>(simd, o, dv, &keys, (prefetcher, prefetch_bytes), buffers, &rescale);
    }
}

/// `scores[j][row] = k[j] . q[row]` for the groups of MR keys that cover `keys`, and the largest score of each row over
/// these groups. The buffer of scores has room for whole groups.
///
/// # Safety
/// `q` is a micro-panel `[depth][NR]`, and the buffers hold a packed block.
#[inline(always)]
unsafe fn scores<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    q: *const f32,
    depth: usize,
    keys: &Range<usize>,
    (prefetcher, prefetch_bytes): (&mut Prefetcher, usize),
    buffers: BlockBuffers,
) -> [S::V; NV] {
    let (width, mut row_max) = (NV * S::LANES, [simd.splat(f32::NEG_INFINITY); NV]);
    for j in (keys.start / MR * MR..keys.end).step_by(MR) {
        prefetcher.prefetch(prefetch_bytes);
        // SAFETY: j + MR <= BLOCK, so packed K has rows j to j + MR and the buffer of scores room for them.
        unsafe {
            let k = BroadcastOperand { from: buffers.k.add(j * depth), row_stride: depth, depth_stride: 1 };
            let q = VectorOperand { from: q, depth_stride: width };
            let products = micro_kernel(simd, k, q, depth, [[simd.splat(0.0); NV]; MR]);
            store_rows(simd, buffers.scores.add(j * width), width, products);
            for row in products {
                for (v, row_max) in row_max.iter_mut().enumerate() {
                    // The score comes first: `max` then ignores a NaN, see `softmax`.
                    *row_max = simd.max(row[v], *row_max);
                }
            }
        }
    }
    row_max
}

/// `o[i][row] = o[i][row] * rescale[row] + sum over keys of v[j][i] * p[j][row]`
///
/// # Safety
/// `o` is a micro-panel `[Dv][NR]`, and the buffers hold a packed block with its p.
#[inline(always)]
unsafe fn values<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    o: *mut f32,
    dv: usize,
    keys: &Range<usize>,
    (prefetcher, prefetch_bytes): (&mut Prefetcher, usize),
    buffers: BlockBuffers,
    rescale: &[f32; PANEL_VECTORS * MAX_LANES],
) {
    let width = NV * S::LANES;
    let mut factors = [simd.splat(0.0); NV];
    for (v, factor) in factors.iter_mut().enumerate() {
        // SAFETY: `rescale` has PANEL_VECTORS vectors, and v < NV <= PANEL_VECTORS.
        *factor = unsafe { simd.load(rescale.as_ptr().add(v * S::LANES)) };
    }
    for i in (0..dv).step_by(MR) {
        prefetcher.prefetch(prefetch_bytes);
        // SAFETY: MR divides Dv, so o has rows i to i + MR and packed V the micro-panel i / MR.
        unsafe {
            let o = o.add(i * width);
            let mut sums = [[simd.splat(0.0); NV]; MR];
            for (r, row) in sums.iter_mut().enumerate() {
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = simd.mul(simd.load(o.add(r * width + v * S::LANES)), factors[v]);
                }
            }
            // Micro-panel i / MR of packed V, `[BLOCK / E][MR]`, from the pair of keys.start on.
            let first = (i * BLOCK + keys.start * MR) / S::ELEMENTS_PER_LANE;
            let v = BroadcastOperand { from: buffers.v.add(first), row_stride: 1, depth_stride: MR };
            let p = VectorOperand { from: buffers.scores.add(keys.start * width), depth_stride: width };
            store_rows(simd, o, width, micro_kernel(simd, v, p, keys.len() / S::ELEMENTS_PER_LANE, sums));
        }
    }
}
