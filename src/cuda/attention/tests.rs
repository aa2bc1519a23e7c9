//! The launches of attention's calls, without a GPU.

use super::*;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::variants;
use crate::problem::attention::{KeyRanges, KeyStorage, Keys, Queries, Score};
use crate::problem::kv_cache_update::NewRows;
use crate::problem::{KvView, Scale};
use crate::tensor::{DType, Tensor};
use std::ptr::{null, null_mut};

/// A call of these sizes over contiguous bf16 keys, without options; no memory.
pub(in crate::cuda) fn problem(rows: usize, seqs: usize, q_heads: usize, head_dim: usize) -> Attention<'static> {
    let view = KvView { data: null_mut(), page_stride: 0, token_stride: 0, head_stride: 0 };
    let empty = Tensor::dense(DType::BF16, null_mut(), &[0, 8, 8]);
    Attention {
        q: empty,
        kv_dtype: DType::BF16,
        k: view,
        v: view,
        out: empty,
        lse: None,
        workspace: None,
        queries: Queries {
            num_seqs: None,
            starts: null(),
            used: None,
            offset: None,
            key_ranges: KeyRanges::NONE,
            tree: None,
            longest: 0,
        },
        keys: Keys {
            starts: None,
            used: None,
            leftpad: None,
            storage: KeyStorage::Contiguous { total: 16 },
            longest: 0,
        },
        score: Score {
            softmax_scale: 1.0,
            q_scale: None,
            k_scale: None,
            softcap: 0.0,
            window_left: -1,
            window_right: -1,
            top_left: false,
            alibi: None,
            sinks: None,
            bias: None,
        },
        v_scale: None,
        scale_cache: None,
        num_rows: rows,
        num_q_heads: q_heads,
        num_kv_heads: 2,
        head_dim,
        value_dim: head_dim,
        max_seqs: seqs,
        batch_invariant: false,
    }
}

/// An H200; without tensor maps as under an old driver.
pub(in crate::cuda) fn device(has_tensor_maps: bool) -> Device {
    Device {
        capability: 90,
        shared_memory: 227 * 1024,
        shared_memory_per_sm: 228 * 1024,
        reserved_per_block: 1024,
        sms: 132,
        has_tensor_maps,
    }
}

fn named(problem: &Attention) -> Vec<(&'static str, i32, i32)> {
    named_on(problem, &device(false))
}

pub(super) fn named_on(problem: &Attention, device: &Device) -> Vec<(&'static str, i32, i32)> {
    names(&LaunchPlan::on(problem, None, *device).expect("the sizes are allowed"))
}

/// The launches but those that combine: the variant, and how many queries its sequences have, 0 where it does not attend.
fn names(plan: &LaunchPlan) -> Vec<(&'static str, i32, i32)> {
    let attending = plan.0.list.iter().filter(|launch| !launch.kernel.starts_with("combine"));
    attending
        .map(|launch| {
            let (min, max) = queries(&launch.parameter);
            (variants::VARIANTS[launch.variant].name, min, max)
        })
        .collect()
}

fn queries(parameter: &Parameter) -> (i32, i32) {
    match parameter {
        Parameter::Attention(params) => (params.min_queries, params.max_queries),
        Parameter::Bias(params) => (params.attention.min_queries, params.attention.max_queries),
        Parameter::CopyRows(_) => (0, 0),
        Parameter::KeyRanges(params) => (params.attention.min_queries, params.attention.max_queries),
        Parameter::RowMasks(params) => (params.attention.min_queries, params.attention.max_queries),
        Parameter::TokenScales(params) => (params.attention.min_queries, params.attention.max_queries),
        Parameter::Prefill(of)
        | Parameter::PrefillBias(of, _)
        | Parameter::PrefillKeyRanges(of)
        | Parameter::PrefillTokenScales(of, _)
        | Parameter::PrefillRowMasks(of) => (of.attention.min_queries, of.attention.max_queries),
        Parameter::Latent(of) => (of.attention.min_queries, of.attention.max_queries),
        Parameter::Fused(of) => {
            let FusedParameter { prefill, decode } = &**of;
            assert_eq!(decode.max_queries + 1, prefill.attention.min_queries);
            (decode.min_queries, prefill.attention.max_queries)
        }
    }
}

#[test]
fn launches_cover_every_sequence_length_exactly_once() {
    let decode = "attention_bf16_128_decode_8warps_none";
    let prefill = "attention_bf16_128_prefill_none";
    assert_eq!(named(&problem(64, 64, 8, 104)), [(decode, 1, i32::MAX)]);
    assert_eq!(named(&problem(65, 64, 8, 104)), [(prefill, 5, i32::MAX), (decode, 1, 4)]);
    // No sequence can have more than 4 queries.
    let older = Device { capability: 80, ..device(false) };
    assert_eq!(named_on(&problem(4, 1, 8, 104), &older), [(decode, 1, 4)]);
    let invariant = Attention { batch_invariant: true, ..problem(64, 64, 8, 104) };
    assert_eq!(named(&invariant), [(prefill, 5, i32::MAX), ("attention_bf16_128_decode_none", 1, 4)]);
    assert!(named(&problem(0, 64, 8, 104)).is_empty());
}

#[test]
fn advice_moves_whole_sequences_and_never_leaves_one_out() {
    let advised = |longest, batch_invariant| {
        let plain = problem(640, 160, 8, 128);
        named(&Attention { queries: Queries { longest, ..plain.queries }, batch_invariant, ..plain })
    };
    let both = [("attention_bf16_128_prefill_none", 5, i32::MAX), ("attention_bf16_128_decode_none", 1, 4)];
    assert_eq!(advised(4, false), [("attention_bf16_128_decode_none", 1, i32::MAX)]);
    assert_eq!(advised(8, false), both);
    assert_eq!(advised(4, true), both);
}

/// Whether the plan stores an update with rows of these strides, and its launches.
fn storing(problem: &Attention, scale: Option<Scale>, strides: &[i64]) -> (bool, Vec<(&'static str, i32, i32)>) {
    let dims = [problem.num_rows, problem.num_kv_heads, problem.head_dim].map(|size| size as i64);
    let dense = Tensor::dense(problem.kv_dtype, null_mut(), &dims);
    let rows = NewRows { rows: Tensor { strides: Some(strides), ..dense }, cache: problem.k, scale };
    let slot_mapping = Tensor::dense(DType::I32, null_mut(), &dims[..1]);
    let (cache_dtype, copies) = (problem.kv_dtype, [None, None]);
    let (num_pages, page_size) = (4, 16);
    let update = KvCacheUpdate {
        key: rows,
        value: rows,
        cache_dtype,
        scale_cache: None,
        slot_mapping,
        copies,
        num_pages,
        page_size,
    };
    let plan = LaunchPlan::on(problem, Some(&update), device(false)).expect("the sizes are allowed");
    (plan.stores_update(), names(&plan))
}

#[test]
fn decode_stores_updates_that_it_can_and_comes_first() {
    let (decode, strides) = (problem(64, 64, 8, 128), [256, 128, 1]);
    assert_eq!(storing(&decode, None, &strides), (true, vec![("attention_bf16_128_decode_8warps_none", 1, i32::MAX)]));
    let both = [("attention_bf16_128_decode_none", 1, 4), ("attention_bf16_128_prefill_none", 5, i32::MAX)];
    let invariant = Attention { batch_invariant: true, ..decode };
    assert_eq!(storing(&invariant, None, &strides), (true, both.to_vec()));
    // Nine CTAs of four warps per KV head, one per tile.
    let few = |rows| Attention { batch_invariant: true, ..problem(rows, 9, 8, 128) };
    assert_eq!(storing(&few(144), None, &strides), (true, both.to_vec()));
    let [first, second] = both;
    assert_eq!(storing(&few(145), None, &strides), (false, vec![second, first]));
    let scale = Some(Scale { values: null(), per_head: false });
    assert!(!storing(&decode, scale, &strides).0);
    assert!(!storing(&decode, None, &[256, 132, 1]).0);
    let of = |dtype| Attention { q: Tensor { dtype, ..decode.q }, kv_dtype: dtype, ..decode };
    assert!(storing(&of(DType::F32), None, &strides).0);
    assert!(!storing(&of(DType::F8E4M3FN), None, &strides).0);
    let wide = Attention { head_dim: 256, value_dim: 256, ..of(DType::F32) };
    assert!(!storing(&wide, None, &[512, 256, 1]).0);
}

#[test]
fn no_launch_has_an_empty_grid() {
    let devices = [device(true), device(false), Device { capability: 80, ..device(false) }];
    for (device, seqs) in devices.iter().flat_map(|device| [0, 1, 40, 200].map(|seqs| (device, seqs))) {
        for (rows, dim) in [1, 6, 300, 5000].iter().flat_map(|rows| [64, 128, 256].map(|dim| (*rows, dim))) {
            for batch_invariant in [false, true] {
                let problem = Attention { batch_invariant, ..problem(rows, seqs, 8, dim) };
                let plan = LaunchPlan::on(&problem, None, *device).expect("the sizes are allowed");
                let grids: Vec<_> = plan.0.list.iter().map(|launch| launch.config.grid).collect();
                assert!(!grids.is_empty() && !grids.as_flattened().contains(&0), "{rows} {seqs} {dim}: {grids:?}");
            }
        }
    }
}

#[test]
fn more_tiles_than_a_grid_holds_are_refused() {
    let prefill = |seqs| {
        let problem = Attention { num_kv_heads: 256, ..problem(1 << 27, seqs, 256, 8) };
        LaunchPlan::on(&problem, None, device(false)).map(|_| ())
    };
    assert!(prefill(1 << 26).is_err_and(|e| e.message.contains("a grid has up to 2^31 - 1")));
    assert!(prefill(1 << 10).is_ok());
}

#[test]
fn the_grid_of_prefill_holds_every_tile_of_every_batch() {
    for (rows, seqs, q_heads) in [(65, 64, 8), (1000, 7, 2), (1000, 999, 6), (300, 40, 48), (5, 1, 8)] {
        let group = q_heads as i64 / 2;
        let problem = problem(rows, seqs, q_heads, 128);
        let plan = LaunchPlan::on(&problem, None, device(false)).expect("the sizes are allowed");
        let prefill = &plan.0.list[0];
        let (smallest, largest) = queries(&prefill.parameter);
        let (smallest, largest) = (i64::from(smallest), i64::from(largest));
        // The most tiles come from as many sequences as possible, each just past a multiple of the tile.
        let (mut left, mut tiles) = (rows as i64, 0);
        for rest in (1..=seqs as i64).rev() {
            let spare = (left - rest * smallest).max(0);
            let queries = (smallest + spare).min(largest).min(left);
            if queries < smallest {
                break;
            }
            tiles += (queries * group + 127) / 128;
            left -= queries;
        }
        let LaunchConfig { grid, .. } = prefill.config;
        assert!(i64::from(grid[0]) >= 2 * tiles.max(1), "{rows} rows, {seqs} sequences, group {group}: {tiles} tiles");
        assert!(grid[0].is_multiple_of(2));
    }
}
