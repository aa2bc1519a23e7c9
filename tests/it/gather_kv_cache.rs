//! `xla_gpu_gather_kv_cache` through its XLA FFI handlers.

use crate::support::cost::{CostSizes, hostile_gathers_cost_no_more, seconds};
use crate::support::{
    ATTENTION_DTYPES, BF16, CacheUpdateCase, F8E4M3FN, F8E5M2, F16, F32, FP8_DTYPES, GatherCase, KvLayout, Random,
    Side, for_each_pool,
};
use std::sync::Mutex;
use std::time::Instant;
use xla_attention::{RayonPool, parallel_for};

#[test]
fn rows_are_copied_bit_by_bit_in_every_layout_and_dtype() {
    for (layout, dtype) in
        KvLayout::PAGED.into_iter().flat_map(|layout| [F32, F16, BF16, F8E4M3FN, F8E5M2].map(|dtype| (layout, dtype)))
    {
        for head_dim in [8, 16, 24, 72] {
            let dims = [head_dim, if layout == KvLayout::Split { 96 - head_dim } else { head_dim }];
            GatherCase { layout, dtype, out: dtype, dims, ..GatherCase::default() }.assert_matches_reference();
        }
    }
}

#[test]
fn fp8_codes_are_decoded_and_multiplied() {
    // The last scale gives numbers that are subnormal in bf16.
    let scales = [None, Some(vec![0.37]), Some(vec![3.0, 0.011]), Some(vec![1e-38])];
    for layout in KvLayout::PAGED {
        for (dtype, out) in FP8_DTYPES.into_iter().flat_map(|dtype| ATTENTION_DTYPES.map(|out| (dtype, out))) {
            for (k_scale, v_scale) in scales.iter().flat_map(|k| scales.iter().map(move |v| (k, v))) {
                let scales = [k_scale.clone(), v_scale.clone()];
                GatherCase { layout, dtype, out, scales, ..GatherCase::default() }.assert_matches_reference();
            }
        }
    }
}

#[test]
fn scales_multiply_16_and_32_bit_caches_too() {
    for dtype in ATTENTION_DTYPES {
        for scales in [[Some(vec![0.37]), None], [None, Some(vec![3.0, 0.011])], [Some(vec![1e30]), Some(vec![-1.0])]] {
            GatherCase { dtype, out: dtype, scales, ..GatherCase::default() }.assert_matches_reference();
        }
    }
}

#[test]
fn every_fp8_code_is_decoded_to_its_value() {
    // The random bytes (5 * 32 * 2 * 2 * 256 of them) contain every code many times.
    for dtype in FP8_DTYPES {
        for out in ATTENTION_DTYPES {
            let (page_size, tables) = (32, (0..5).collect());
            let call =
                GatherCase { page_size, tables, max_pages: 5, lens: vec![160], capacity: 160, ..GatherCase::default() };
            GatherCase { dtype, out, dims: [256; 2], ..call }.assert_matches_reference();
        }
    }
}

#[test]
fn hostile_lengths_and_pages_are_clamped() {
    for layout in KvLayout::PAGED {
        for dtype in [F32, F8E5M2] {
            let call = GatherCase { layout, dtype, out: dtype, ..GatherCase::default() };
            let extremes = vec![i32::MIN, -1, i32::MAX, 5, -7, 100, i32::MAX, i32::MIN, 1];
            GatherCase { tables: extremes, lens: vec![12; 3], capacity: 40, ..call.clone() }.assert_matches_reference();
            for lens in [vec![-1, i32::MAX, 5], vec![i32::MIN; 3], vec![i32::MAX; 3], vec![12, 13, -12]] {
                for capacity in [0, 1, 11, 12, 13, 36, 50] {
                    GatherCase { lens: lens.clone(), capacity, ..call.clone() }.assert_matches_reference();
                }
            }
        }
    }
}

#[test]
fn thousands_of_sequences_are_gathered() {
    // More sequences than a CTA sums at once. Their lengths are 0, 1 or more.
    for (seqs, capacity) in [(1023, 800), (1024, 5000), (1025, 1), (4100, 4000), (5000, 20000)] {
        let mut random = Random::new(seqs as u64);
        let lens = (0..seqs).map(|_| random.below(6) as i32 - 2).collect();
        let tables = (0..2 * seqs).map(|_| random.below(5) as i32).collect();
        let call = GatherCase { max_pages: 2, tables, lens, capacity, heads: 1, dims: [8, 8], ..GatherCase::default() };
        GatherCase { layout: KvLayout::Stacked, dtype: BF16, out: BF16, ..call }.assert_matches_reference();
    }
}

#[test]
fn the_sequences_of_rows_are_found_among_many() {
    // A GPU adds up 4096 lengths per CTA and searches cu_seqlens in 256 steps, twice if there are more than 2^18.
    for seqs in [1025_usize, 4096, 4097, 8192, 12289, (1 << 18) + 1] {
        let at_borders = |b: usize| [0, 1, 255].contains(&(b % 256)) || b + 1 == seqs;
        let patterns: [(&str, &dyn Fn(usize) -> i32); 4] = [
            ("only the last", &|b| if b + 1 == seqs { 7 } else { 0 }),
            ("at borders", &|b| if at_borders(b) { (b % 5) as i32 } else { 0 }),
            ("all but borders", &|b| if at_borders(b) { -1 } else { i32::from(b % 3 == 0) }),
            ("of any length", &|b| [i32::MAX, i32::MIN, 3, -1][b / 7 % 4]),
        ];
        for (name, len) in patterns {
            let lens: Vec<i32> = (0..seqs).map(len).collect();
            let tables = (0..2 * seqs).map(|entry| (entry % 7) as i32 - 1).collect();
            let capacity = if seqs > 1 << 18 { 100 } else { 1500 };
            let call =
                GatherCase { max_pages: 2, tables, lens, capacity, heads: 1, dims: [8; 2], ..GatherCase::default() };
            println!("{seqs} sequences, {name}");
            GatherCase { layout: KvLayout::Stacked, dtype: BF16, out: BF16, ..call }.assert_matches_reference();
        }
    }
}

#[test]
fn up_to_32_sequences_are_gathered_in_rows_of_whole_warps() {
    // A warp of a GPU finds the tokens of a small call alone.
    for (seqs, capacity) in [(1, 40), (5, 1), (31, 90), (32, 64), (32, 3000), (33, 90)] {
        let mut random = Random::new(seqs);
        let lens: Vec<i32> = (0..seqs).map(|b| if b % 4 == 1 { 0 } else { random.below(8) as i32 }).collect();
        let tables: Vec<i32> = (0..2 * seqs).map(|_| random.below(7) as i32 - 1).collect();
        for (dtype, out) in [(BF16, BF16), (F8E4M3FN, F8E4M3FN), (F8E4M3FN, BF16), (F8E5M2, F32)] {
            for (layout, dims) in [(KvLayout::Interleaved, [64; 2]), (KvLayout::Split, [64, 128])] {
                let (tables, lens) = (tables.clone(), lens.clone());
                let call = GatherCase { max_pages: 2, tables, lens, capacity, heads: 8, dims, ..GatherCase::default() };
                GatherCase { layout, dtype, out, ..call }.assert_matches_reference();
            }
        }
    }
}

#[test]
fn results_larger_than_the_processor_caches_are_right() {
    // Results of at least 16 MiB. Where a run is one token, heads of 1, 2, 4, 8 and 16 vectors have loops of their own. With D = 72, not every head is aligned for whole vectors.
    for (dtype, out, head_dim, layout, scale) in [
        (BF16, BF16, 64, KvLayout::Split, None),
        (F8E4M3FN, F8E4M3FN, 64, KvLayout::Interleaved, None),
        (F8E4M3FN, BF16, 64, KvLayout::Interleaved, Some(vec![0.37, 3.0])),
        (F16, F16, 64, KvLayout::Interleaved, None),
        (F32, F32, 64, KvLayout::Interleaved, None),
        (F32, F32, 128, KvLayout::Interleaved, None),
        (F32, F32, 256, KvLayout::Interleaved, None),
        (BF16, BF16, 512, KvLayout::Interleaved, None),
        (F8E4M3FN, F8E4M3FN, 128, KvLayout::Stacked, None),
        (F8E4M3FN, BF16, 72, KvLayout::Interleaved, Some(vec![0.37, 3.0])),
        (F8E5M2, F32, 72, KvLayout::PerPage, None),
    ] {
        let (heads, len) = (2, (1 << 24) / (2 * head_dim * out.size()) / 4 + 7);
        let mut random = Random::new(head_dim as u64);
        let tables = (0..4 * len.div_ceil(4)).map(|_| random.below(5) as i32).collect();
        let (lens, max_pages, capacity) = (vec![len as i32; 4], len.div_ceil(4), 4 * len + 3);
        let (dims, scales) = ([head_dim; 2], [scale, None]);
        GatherCase {
            layout,
            dtype,
            out,
            heads,
            dims,
            max_pages,
            tables,
            lens,
            capacity,
            scales,
            ..GatherCase::default()
        }
        .assert_matches_reference();
    }
}

#[test]
fn rows_that_an_update_has_written_are_gathered() {
    for layout in KvLayout::PAGED {
        for dtype in ATTENTION_DTYPES {
            // Tokens of two sequences, the second with its pages in descending order.
            let (tables, lens) = (vec![0, 3, 2, 1], vec![5, 8]);
            let slots: Vec<i64> = (0..4).chain([12]).chain(8..12).chain(4..8).collect();
            let update = CacheUpdateCase { layout, dtype, num_pages: 4, slots, ..CacheUpdateCase::default() };
            let caches = update.invocation(true).results(Side::EndsAtGuard);
            let [num_pages, capacity, max_pages] = [4, 13, 2];
            let call =
                GatherCase { layout, dtype, out: dtype, num_pages, max_pages, tables, lens, ..GatherCase::default() };
            let actual = GatherCase { capacity, ..call }.of_caches(caches).results(Side::EndsAtGuard);
            assert!(actual[..2] == update.rows(), "{layout:?} {dtype:?}");
        }
    }
}

#[test]
fn every_pool_gives_the_same_rows() {
    let mut random = Random::new(3);
    let tables = (0..40 * 8).map(|_| random.below(64) as i32).collect();
    let lens = (0..40).map(|_| random.below(128) as i32).collect();
    let call = GatherCase { dtype: BF16, out: BF16, num_pages: 64, page_size: 16, heads: 8, ..GatherCase::default() };
    let call = GatherCase { dims: [64; 2], max_pages: 8, tables, lens, capacity: 2500, ..call };
    for_each_pool(|pool| assert!(call.invocation().run(Side::BeginsAtGuard, pool).unwrap() == call.expected()));
}

#[test]
fn hostile_metadata_costs_no_more_than_valid_metadata() {
    hostile_gathers_cost_no_more(CostSizes::small(), 10.0);
}

/// At a size at which the time is well above the noise. `--ignored --nocapture` prints a table.
#[test]
#[ignore = "a measurement: wants a machine for itself"]
fn hostile_metadata_costs_at_most_twice_as_much() {
    for sizes in CostSizes::large() {
        hostile_gathers_cost_no_more(CostSizes { rows: 1 << 14, ..sizes }, 2.0);
    }
}

/// Bytes that one task of `copying` writes.
const CHUNK: usize = 1 << 20;

/// Seconds in which all threads copy this many bytes in pieces that are out of order and divide `CHUNK`.
fn copying(bytes: usize, piece: usize) -> f64 {
    let (from, mut to) = (vec![1u8; bytes], vec![2u8; bytes]);
    let (count, per_chunk) = (bytes / piece, CHUNK / piece);
    let chunks: Vec<_> = to.chunks_mut(CHUNK).map(Mutex::new).collect();
    let once = || {
        let began = Instant::now();
        let copy = |(): &mut (), i: usize| {
            for (j, to) in chunks[i].lock().unwrap().chunks_exact_mut(piece).enumerate() {
                to.copy_from_slice(&from[(i * per_chunk + j) * 17 % count * piece..][..piece]);
            }
        };
        parallel_for(&RayonPool, chunks.len(), || (), copy).unwrap();
        began.elapsed().as_secs_f64()
    };
    (0..5).map(|_| once()).fold(f64::INFINITY, f64::min)
}

/// On the CPU. `--ignored --nocapture` prints a table.
#[test]
#[ignore = "a measurement: wants a machine for itself"]
fn bandwidth_of_gathering_and_copying() {
    let (seqs, len) = (16, 1024);
    for (dtype, out) in
        [(BF16, BF16), (F32, F32), (F8E4M3FN, F8E4M3FN), (F8E4M3FN, BF16), (F8E4M3FN, F32), (F8E5M2, F32)]
    {
        for (layout, page_size, dim) in KvLayout::PAGED
            .into_iter()
            .flat_map(|layout| [(1, 128), (16, 64), (16, 128), (256, 128)].map(|(page, dim)| (layout, page, dim)))
        {
            let pages = len / page_size;
            let tables = (0..seqs * pages).map(|i| (i * 17 % (seqs * pages)) as i32).collect();
            let sizes = GatherCase { layout, dtype, out, page_size, heads: 8, dims: [dim; 2], ..GatherCase::default() };
            let lens = vec![len as i32; seqs];
            let call =
                GatherCase { num_pages: seqs * pages, max_pages: pages, tables, lens, capacity: seqs * len, ..sizes };
            let bytes = 2 * seqs * len * 8 * dim * (dtype.size() + out.size()) / 2;
            // Average length of contiguous bytes in the cache and the result.
            let heads = if layout == KvLayout::Interleaved { 1 } else { 8 * page_size };
            let piece = heads * dim * (dtype.size() + out.size()) / 2;
            let (ours, copy, pieces) =
                (seconds(&call.invocation()), copying(bytes, CHUNK), copying(bytes, piece.next_power_of_two()));
            let rate = |seconds: f64| 2e-9 * bytes as f64 / seconds;
            println!(
                "{dtype:?} to {out:?}, {layout:?}, pages of {page_size}, D {dim}: {:.1} GB/s, a copy {:.1}: {:.2}, \
                 of {piece} bytes a piece {:.1}: {:.2}",
                rate(ours),
                rate(copy),
                copy / ours,
                rate(pieces),
                pieces / ours
            );
        }
    }
}
