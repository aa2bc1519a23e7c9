//! Which calls Hopper's prefill takes, in which tiles.

use super::super::LaunchPlan;
use super::super::tests::{device, named_on, problem};
use super::*;
use crate::problem::attention::{Alibi, Keys, PageTable, Queries, Score};
use crate::problem::{KvScaleCache, Scale};
use crate::tensor::DType;
use std::ptr::null;

/// 1000 rows of 12 heads over 2 KV heads of 2000 keys, in 7 sequences; no memory.
pub(in crate::cuda::attention) fn ragged() -> Attention<'static> {
    let plain = problem(1000, 7, 12, 128);
    let view = KvView { token_stride: 256, head_stride: 128, ..plain.k };
    let q = Tensor::dense(DType::BF16, null_mut(), &[1000, 12, 128]);
    let storage = KeyStorage::Contiguous { total: 2000 };
    Attention { q, k: view, v: view, keys: Keys { storage, ..plain.keys }, ..plain }
}

/// The same keys in an interleaved cache.
pub(in crate::cuda::attention) fn paged(page_size: usize) -> Attention<'static> {
    let plain = ragged();
    let table = PageTable { entries: null(), stride: 0, max_pages: 4096, num_pages: 50, page_size };
    let view = KvView { page_stride: 512 * page_size as i64, token_stride: 512, head_stride: 256, ..plain.k };
    Attention { k: view, v: view, keys: Keys { storage: KeyStorage::Paged(table), ..plain.keys }, ..plain }
}

pub(super) fn first_kernel(problem: &Attention) -> &'static str {
    named_on(problem, &device(true))[0].0
}

#[test]
fn calls_with_a_variant_take_the_kernel() {
    assert_eq!(first_kernel(&ragged()), "hopper_prefill_bf16_128_contiguous_none");
    assert_eq!(first_kernel(&paged(16)), "hopper_prefill_bf16_128_paged_none");
    let mut capped = paged(8);
    capped.score.softcap = 30.0;
    assert_eq!(first_kernel(&capped), "hopper_prefill_bf16_128_paged_softcap");
    let narrow = Attention { head_dim: 96, value_dim: 96, ..capped };
    assert_eq!(first_kernel(&narrow), "hopper_prefill_bf16_96_paged_softcap_alibi");
    capped.score.alibi = Some(Alibi { slopes: null(), per_sequence: false });
    assert_eq!(first_kernel(&capped), "hopper_prefill_bf16_128_paged_softcap_alibi");
    capped.score.softcap = 0.0;
    assert_eq!(first_kernel(&capped), "hopper_prefill_bf16_128_paged_softcap_alibi");
    assert_eq!(named_on(&ragged(), &device(false))[0].0, "attention_bf16_128_prefill_none");
    // The short sequences have a separate decode launch.
    assert_eq!(named_on(&paged(16), &device(true))[1].0, "attention_bf16_128_decode_8warps_none");
    let wide = Attention { out: Tensor { dtype: DType::F32, ..ragged().out }, ..ragged() };
    assert_eq!(first_kernel(&wide), "hopper_prefill_bf16_128_contiguous_none");
    let short = Attention { queries: Queries { longest: 1, ..ragged().queries }, ..ragged() };
    assert_eq!(first_kernel(&short), "attention_bf16_128_decode_8warps_none");
}

/// A call of so many query rows and this mask, which packs two query heads.
fn of_lengths(plain: &Attention<'static>, head_dim: usize, rows: usize, window_right: i64) -> Attention<'static> {
    let q = Tensor::dense(DType::BF16, null_mut(), &[1000, 12, 64]);
    let mut problem = Attention { q, head_dim, value_dim: head_dim, num_rows: rows, ..*plain };
    problem.score.window_right = window_right;
    problem
}

#[test]
fn short_causal_sequences_take_short_tiles() {
    let named = |head_dim, rows, window_right| first_kernel(&of_lengths(&paged(16), head_dim, rows, window_right));
    let tall = "hopper_prefill_bf16_64_paged_none";
    assert_eq!(named(64, 7 * 512, 0), "hopper_prefill_bf16_64_short_paged_none");
    assert_eq!(named(64, 7 * 512 + 1, 0), tall);
    assert_eq!(named(64, 7 * 512, -1), tall);
    assert_eq!(named(128, 7 * 512, 0), "hopper_prefill_bf16_128_paged_none");
}

#[test]
fn very_short_sequences_take_tiny_tiles() {
    let with = |head_dim: usize, rows: usize, window_right: i64, total: usize| {
        let plain = ragged();
        let keys = Keys { storage: KeyStorage::Contiguous { total }, ..plain.keys };
        of_lengths(&Attention { keys, ..plain }, head_dim, rows, window_right)
    };
    let named = |problem: &Attention| {
        let named = named_on(problem, &device(true));
        (named[0].0, named.len())
    };
    let tiny = |bucket| (format!("hopper_prefill_bf16_{bucket}_tiny_contiguous_none"), 1);
    for (bucket, head_dim, rows, window_right) in
        [(64, 64, 512, 0), (64, 40, 128, -1), (96, 96, 112, 0), (128, 128, 112, -1), (192, 136, 112, 0)]
    {
        let problem = with(head_dim, 7 * rows, window_right, 14 * rows);
        let (name, launches) = named(&problem);
        assert_eq!((name.to_owned(), launches), tiny(bucket));
        let longest = |longest| Attention { queries: Queries { longest, ..problem.queries }, ..problem };
        assert_eq!(named(&longest(4 * rows)), (name, 1));
        // One row more; more keys; a long sequence; results that do not depend on the batch.
        let longer = Attention { num_rows: 7 * rows + 1, ..problem };
        let more_keys = with(head_dim, 7 * rows, window_right, 14 * rows + 1);
        let invariant = Attention { batch_invariant: true, ..problem };
        for other in [longer, more_keys, longest(4 * rows + 1), invariant] {
            assert!(!named(&other).0.contains("tiny"));
        }
    }
}

#[test]
fn few_rows_over_few_keys_in_pages_take_tiny_tiles() {
    let keys_of = |problem: &Attention<'static>, max_pages: usize| {
        let KeyStorage::Paged(table) = problem.keys.storage else { unreachable!() };
        Keys { storage: KeyStorage::Paged(PageTable { max_pages, ..table }), ..problem.keys }
    };
    let plain = paged(16);
    // Seven sequences, groups of six heads in packs of two.
    let with = |head_dim, rows: usize, max_pages| {
        let problem = of_lengths(&plain, head_dim, rows, 0);
        Attention { keys: keys_of(&problem, max_pages), ..problem }
    };
    let is_tiny = |problem: &Attention| first_kernel(problem).contains("tiny_paged");
    for head_dim in [64, 96, 128, 192] {
        // The most rows over up to 256 keys and over up to 1024, at D 192 512.
        let (most, pages) = (if head_dim == 64 { 128 } else { 112 }, if head_dim == 192 { 32 } else { 64 });
        for (rows, pages, expected) in [
            (most, 16, true),
            (most + 1, 16, false),
            (32, 17, true),
            (33, 17, false),
            (32, pages, true),
            (32, pages + 1, false),
        ] {
            assert_eq!(is_tiny(&with(head_dim, 7 * rows, pages)), expected, "D {head_dim}, {rows} rows, {pages} pages");
        }
        assert!(is_tiny(&with(head_dim, 10, 16)) && !is_tiny(&with(head_dim, 9, 16)));
        // 134 tiles, one query head per KV head, two queries and more per sequence.
        let many = |rows| Attention { num_q_heads: 2, max_seqs: 67, ..with(head_dim, rows, 64) };
        assert!(is_tiny(&many(3 * 67)) && !is_tiny(&many(3 * 67 - 1)));
        let few = with(head_dim, 7 * 32, 16);
        assert!(!is_tiny(&Attention { batch_invariant: true, ..few }));
        assert!(!is_tiny(&Attention { head_dim: head_dim - 8, ..few }));
    }
}

#[test]
fn decode_of_more_tiles_than_sms_over_few_keys_takes_tiny_tiles() {
    let plain = paged(16);
    let KeyStorage::Paged(table) = plain.keys.storage else { unreachable!() };
    let sms = device(true).sms as usize;
    // One query per sequence, two KV heads.
    let with = |head_dim, group: usize, seqs, max_pages| {
        let problem = of_lengths(&plain, head_dim, seqs, 0);
        let keys = Keys { storage: KeyStorage::Paged(PageTable { max_pages, ..table }), ..problem.keys };
        Attention { num_q_heads: 2 * group, max_seqs: seqs, keys, ..problem }
    };
    let is_tiny = |problem: &Attention| first_kernel(problem).contains("tiny_paged");
    for head_dim in [64, 128] {
        let [few, many, more] = [sms / 2, sms, sms + 1];
        assert!(!is_tiny(&with(head_dim, 8, few, 64)) && is_tiny(&with(head_dim, 8, many, 64)));
        assert!(!is_tiny(&with(head_dim, 8, more, 64)) && is_tiny(&with(head_dim, 12, more, 64)));
        assert!(!is_tiny(&with(head_dim, 8, many, 65)) && !is_tiny(&with(head_dim, 4, many, 64)));
    }
    for head_dim in [96, 192] {
        assert!(is_tiny(&with(head_dim, 8, 9, 32)) && !is_tiny(&with(head_dim, 8, 8, 32)));
        assert!(!is_tiny(&with(head_dim, 8, 9, 33)) && is_tiny(&with(head_dim, 8, sms, 33)));
    }
}

#[test]
fn f32_takes_its_kernel_in_every_layout_up_to_128_columns() {
    let of_f32 = |plain: Attention<'static>, head_dim: usize| {
        let rows = Tensor::dense(DType::F32, null_mut(), &[1000, 12, 128]);
        Attention { q: rows, out: rows, kv_dtype: DType::F32, head_dim, value_dim: head_dim, ..plain }
    };
    assert_eq!(first_kernel(&of_f32(ragged(), 128)), "hopper_prefill_f32_128_none");
    for page_size in [1, 12, 16] {
        assert_eq!(first_kernel(&of_f32(paged(page_size), 72)), "hopper_prefill_f32_128_none");
    }
    let mut capped = of_f32(paged(16), 40);
    capped.score.softcap = 30.0;
    assert_eq!(first_kernel(&capped), "hopper_prefill_f32_64_softcap_alibi");
    // Rows at multiples of 16 bytes, which TMA could not take.
    let strided = of_f32(ragged(), 64);
    let view = KvView { token_stride: 260, head_stride: 132, ..strided.k };
    assert_eq!(first_kernel(&Attention { k: view, ..strided }), "hopper_prefill_f32_64_none");
    assert_eq!(first_kernel(&of_f32(ragged(), 136)), "attention_f32_256_prefill_none");
}

#[test]
fn e4m3fn_q_k_and_v_take_the_fp8_kernel() {
    let codes = |plain: Attention<'static>| {
        let q = Tensor::dense(DType::F8E4M3FN, null_mut(), &[1000, 12, 128]);
        let out = Tensor::dense(DType::BF16, null_mut(), &[1000, 12, 128]);
        Attention { q, kv_dtype: DType::F8E4M3FN, out, ..plain }
    };
    assert_eq!(first_kernel(&codes(ragged())), "hopper_prefill_fp8_128_short_contiguous_scaled");
    let mut capped = codes(paged(16));
    capped.score.softcap = 30.0;
    assert_eq!(first_kernel(&capped), "hopper_prefill_fp8_128_paged_softcap_alibi");
    let plain = codes(ragged());
    let q = Tensor { dtype: DType::BF16, ..plain.q };
    assert_eq!(first_kernel(&Attention { q, ..plain }), "attention_fp8_fp8_128_prefill_softcap_alibi");
    // Rows of 8-byte chunks.
    let view = KvView { token_stride: 264, ..plain.k };
    assert_eq!(first_kernel(&Attention { k: view, ..plain }), "attention_fp8_fp8_128_prefill_softcap_alibi");
    let misplaced = KvView { data: std::ptr::without_provenance_mut(8), ..plain.k };
    assert_eq!(first_kernel(&Attention { v: misplaced, ..plain }), "attention_fp8_fp8_128_prefill_softcap_alibi");
    // Sequences of up to 1024 packed rows on average, over packed keys that are few.
    let short = |rows, total| {
        let plain = ragged();
        let keys = Keys { storage: KeyStorage::Contiguous { total }, ..plain.keys };
        codes(of_lengths(&Attention { keys, ..plain }, 128, rows, -1))
    };
    let name = |problem: &Attention| first_kernel(problem).to_owned();
    assert_eq!(name(&short(7 * 512, 14 * 512)), "hopper_prefill_fp8_128_short_contiguous_scaled");
    for general in [
        short(7 * 512 + 1, 14 * 512),
        short(7 * 512, 14 * 512 + 1),
        Attention { batch_invariant: true, ..short(7 * 512, 14 * 512) },
    ] {
        assert_eq!(name(&general), "hopper_prefill_fp8_128_contiguous_scaled");
    }
}

#[test]
fn eight_bit_pages_are_converted_for_16_bit_queries() {
    let over = |plain: Attention<'static>, kv_dtype| Attention { kv_dtype, ..plain };
    for (dtype, page_size) in [(DType::F8E4M3FN, 16), (DType::F8E5M2, 8)] {
        assert_eq!(first_kernel(&over(paged(page_size), dtype)), "hopper_prefill_8bit_128_8bit_row_scaled");
    }
    let mut capped = over(paged(16), DType::F8E4M3FN);
    capped.score.softcap = 30.0;
    assert_eq!(first_kernel(&capped), "hopper_prefill_8bit_128_8bit_softcap_alibi");
    // With a scale per row.
    let scale_cache = Some(KvScaleCache { k: capped.k, v: capped.v });
    let scaled = |plain: Attention<'static>, kv_dtype| Attention { kv_dtype, scale_cache, ..plain };
    for dtype in [DType::F8E4M3FN, DType::I8] {
        assert_eq!(first_kernel(&scaled(paged(16), dtype)), "hopper_prefill_token_scales_128_token_scales");
    }
    for problem in [
        // TMA does not load pages of 12 tokens; packed keys; D or Dv between the tiles; a soft cap beside scales per row.
        over(paged(12), DType::F8E4M3FN),
        scaled(paged(12), DType::I8),
        over(ragged(), DType::F8E4M3FN),
        of_dims(&over(paged(16), DType::F8E4M3FN), 96, 96),
        of_dims(&over(paged(16), DType::F8E4M3FN), 128, 64),
        scaled(capped, DType::I8),
    ] {
        assert!(first_kernel(&problem).starts_with("attention_"));
    }
}

#[test]
fn short_sequences_among_long_ones_take_prefill() {
    let names = |problem: &Attention| named_on(problem, &device(true));
    let all = [("hopper_prefill_bf16_128_contiguous_none", 1, i32::MAX)];
    let of_keys = |total| {
        let plain = ragged();
        Attention { keys: Keys { storage: KeyStorage::Contiguous { total }, ..plain.keys }, ..plain }
    };
    let of_pages = |max_pages, seqs| {
        let plain = paged(16);
        let KeyStorage::Paged(table) = plain.keys.storage else { unreachable!() };
        let storage = KeyStorage::Paged(PageTable { max_pages, ..table });
        Attention { keys: Keys { storage, ..plain.keys }, max_seqs: seqs, ..plain }
    };
    // 1000 rows: up to two keys for each.
    assert_eq!(names(&of_keys(2000)), all);
    // A row attends to up to 1024 keys; or sequences are long on average, with four keys per row.
    let windowed = |left| {
        let plain = of_pages(65, 7);
        Attention { score: Score { window_left: left, window_right: 0, ..plain.score }, ..plain }
    };
    for problem in [of_pages(64, 7), windowed(1023), of_pages(250, 1), of_pages(83, 3)] {
        assert_eq!(names(&problem), [("hopper_prefill_bf16_128_paged_none", 1, i32::MAX)]);
    }
    // Few rows per sequence are decode's.
    let many = Attention { max_seqs: 999, ..of_pages(64, 7) };
    for problem in [
        of_keys(2001),
        Attention { batch_invariant: true, ..of_keys(2000) },
        of_pages(65, 7),
        windowed(1024),
        of_pages(251, 1),
        of_pages(84, 3),
        of_pages(65, 4),
        many,
    ] {
        assert_eq!(names(&problem).len(), 2);
    }
}

/// A call of sequences with as many keys as queries, without a mask.
fn of_equal_lengths(head_dim: usize, rows: usize, seqs: usize) -> Attention<'static> {
    let storage = KeyStorage::Contiguous { total: rows };
    let plain = of_dims(&ragged(), head_dim, head_dim);
    let mut problem = Attention { num_rows: rows, max_seqs: seqs, keys: Keys { storage, ..plain.keys }, ..plain };
    problem.score.window_right = -1;
    problem
}

#[test]
fn calls_without_a_mask_run_in_clusters() {
    let of = of_equal_lengths;
    let name = |problem: &Attention| first_kernel(problem).to_owned();
    // Two query heads are packed.
    for (head_dim, bucket) in [(136, "192"), (192, "192"), (200, "256"), (256, "256")] {
        let clusters = format!("hopper_prefill_bf16_{bucket}_cluster_contiguous_none");
        let general = format!("hopper_prefill_bf16_{bucket}_contiguous_none");
        for (rows, seqs) in [(512, 1), (4 * 640, 4), (4096, 1)] {
            assert_eq!(name(&of(head_dim, rows, seqs)), clusters, "{seqs} sequences of {rows} rows");
        }
        // Short sequences; an odd number of tiles; lengths that differ.
        for (rows, seqs) in [(384, 1), (3 * 576, 3), (4 * 640 + 1, 4), (4095, 1), (5 * 5000, 5)] {
            assert_eq!(name(&of(head_dim, rows, seqs)), general, "{seqs} sequences of {rows} rows");
        }
        let plain = of(head_dim, 4 * 1024, 4);
        let longest = |longest| Attention { queries: Queries { longest, ..plain.queries }, ..plain };
        assert_eq!(name(&longest(1024)), clusters);
        assert_eq!(name(&longest(2000)), general);
        let causal = of_lengths(&plain, head_dim, plain.num_rows, 0);
        for other in [causal, Attention { batch_invariant: true, ..plain }] {
            assert_eq!(name(&other), general);
        }
    }
    assert_eq!(name(&of(128, 4096, 1)), "hopper_prefill_bf16_128_contiguous_none");
    // Tiles of 64 rows.
    for (rows, kernel) in [(1024, "512_cluster"), (1088, "512_cluster"), (1056, "512"), (320, "512")] {
        assert_eq!(name(&of(512, rows, 1)), format!("hopper_prefill_bf16_{kernel}_contiguous_none"), "{rows} rows");
    }
    let wide = of(256, 4096, 1);
    let plan = LaunchPlan::on(&wide, None, device(true)).expect("the sizes are allowed");
    let launch = &plan.0.list[0];
    // Six packs of 32 pairs of tiles.
    let clusters = (device(true).sms / 2).min(6 * 32);
    assert_eq!((launch.config.grid, launch.attributes.cluster), ([clusters, 2, 1], 2));
}

#[test]
fn long_causal_calls_run_in_clusters() {
    let of = |head_dim: usize, rows: usize, keys: usize, seqs: usize| {
        let storage = KeyStorage::Contiguous { total: keys };
        let plain = of_equal_lengths(head_dim, rows, seqs);
        let mut problem = Attention { keys: Keys { storage, ..plain.keys }, ..plain };
        problem.score.window_right = 0;
        problem
    };
    let name = |problem: &Attention| first_kernel(problem).to_owned();
    let clusters = "hopper_prefill_bf16_256_cluster_contiguous_none";
    let general = "hopper_prefill_bf16_256_contiguous_none";
    // 12 query heads, of which two are packed.
    for (rows, keys, seqs) in [(4096, 4096, 1), (2 * 2048, 2 * 2048, 2), (4 * 1024, 4 * 2048, 4), (512, 2048, 4)] {
        assert_eq!(name(&of(256, rows, keys, seqs)), clusters, "{seqs} sequences of {rows} rows");
    }
    // Few pairs of tiles; few keys; an odd number of tiles.
    for (rows, keys, seqs) in [(3968, 3968, 1), (8 * 1024, 8 * 1024, 8), (4096 + 64, 4096 + 64, 1), (64, 2048, 1)] {
        assert_eq!(name(&of(256, rows, keys, seqs)), general, "{seqs} sequences of {rows} rows");
    }
    let long = of(256, 4096, 4096, 1);
    let [mut windowed, mut ahead, mut top_left] = [long; 3];
    windowed.score.window_left = 1000;
    ahead.score.window_right = 5;
    top_left.score.top_left = true;
    for other in [windowed, ahead, top_left, Attention { batch_invariant: true, ..long }] {
        assert_eq!(name(&other), general);
    }
    // At D 192 with many more keys than rows only.
    assert_eq!(name(&of(192, 4096, 3 * 4096, 1)), "hopper_prefill_bf16_192_contiguous_none");
    assert_eq!(name(&of(192, 4096, 4 * 4096, 1)), "hopper_prefill_bf16_192_cluster_contiguous_none");
}

#[test]
fn unsupported_calls_take_the_portable_kernel() {
    let portable = "attention_bf16_128_prefill_none";
    let plain = ragged();
    let broadcast = Attention { k: KvView { token_stride: 0, ..plain.k }, ..plain };
    let empty = Attention { keys: Keys { storage: KeyStorage::Contiguous { total: 0 }, ..plain.keys }, ..plain };
    let values = 1.0f32;
    // Long sequences, in several packs per KV head.
    let queries = Queries { longest: 1000, ..plain.queries };
    let scaled = Attention { v_scale: Some(Scale { values: &raw const values, per_head: true }), queries, ..plain };
    for problem in [broadcast, empty, scaled] {
        assert_eq!(first_kernel(&problem), portable);
    }
}

/// The problem with these head dimensions; rows stay where they are.
pub(super) fn of_dims(plain: &Attention<'static>, head_dim: usize, value_dim: usize) -> Attention<'static> {
    let [q, out] = [head_dim, value_dim].map(|dim| {
        let dims: &[i64] = Box::leak(Box::new([1000, 12, dim as i64]));
        Tensor::dense(DType::BF16, null_mut(), dims)
    });
    Attention { q, out, head_dim, value_dim, ..*plain }
}

#[test]
fn every_head_dimension_takes_the_smallest_tile() {
    let tile = |head_dim, value_dim| {
        let contiguous = first_kernel(&of_dims(&ragged(), head_dim, value_dim));
        let name = contiguous.strip_prefix("hopper_prefill_bf16_").expect("the kernel takes it");
        let tile = name.strip_suffix("_contiguous_none").expect("there is no transform");
        // Clipped pages of several atom columns are in the blocks of contiguous keys.
        let pages = first_kernel(&of_dims(&paged(16), head_dim, value_dim));
        let dims = if head_dim == value_dim { head_dim.to_string() } else { format!("{head_dim}x{value_dim}") };
        let is_clipped = tile != "64" && tile != dims;
        let storage = if is_clipped { "contiguous" } else { "paged" };
        assert_eq!(pages, format!("hopper_prefill_bf16_{tile}_{storage}_none"));
        tile
    };
    for dim in (8..=512).step_by(8) {
        let buckets = [64, 96, 128, 192, 256, 512];
        let expected = buckets.into_iter().find(|bucket| *bucket >= dim).map(|bucket| bucket.to_string());
        assert_eq!(Some(tile(dim, dim)), expected.as_deref(), "D {dim}");
    }
    for (head_dim, value_dim, expected) in [
        (8, 72, "96"),
        (96, 64, "96"),
        (128, 8, "128"),
        (64, 128, "128"),
        (136, 128, "192x128"),
        (192, 8, "192x128"),
        (128, 136, "192"),
        (192, 200, "256"),
        (256, 8, "256"),
        (264, 8, "512"),
        (8, 512, "512"),
    ] {
        assert_eq!(tile(head_dim, value_dim), expected, "D {head_dim}, Dv {value_dim}");
    }
}

#[test]
fn heads_of_long_sequences_are_packed_by_powers_of_two() {
    for (heads, pack_gqa, packs) in [(2, 1, 2), (8, 4, 2), (12, 2, 6), (14, 1, 14), (256, 64, 4)] {
        let plain = ragged();
        let q = Tensor { dims: &[1000, 256, 128], ..plain.q };
        let queries = Queries { longest: 1000, ..plain.queries };
        let problem = Attention { q, num_q_heads: heads, queries, ..plain };
        let prefill = HopperPrefill::of(&problem, &device(true)).expect("the kernel takes it");
        assert_eq!((prefill.pack_gqa, prefill.num_packs(&problem)), (pack_gqa, packs), "{heads} heads");
    }
}

#[test]
fn packs_of_all_heads_save_tiles_of_few_queries() {
    // Queries per sequence, query heads of 2 KV heads, the expected rows per query, packs and queries per tile of 128 rows.
    for (queries, heads, expected) in [
        // Four tiles with a padding head and without: with it, rows leave by TMA.
        (64, 14, (8, 2, 16)),
        (90, 14, (7, 2, 18)),
        // Seven tiles either way: the rows of one head leave by TMA.
        (112, 14, (1, 14, 128)),
        (64, 10, (5, 2, 25)),
        (85, 6, (1, 6, 128)),
        (84, 6, (3, 2, 42)),
        // Three packs of two heads have as many tiles.
        (64, 12, (2, 6, 64)),
        (16, 24, (16, 2, 8)),
        (64, 16, (8, 2, 16)),
    ] {
        let problem = Attention { num_rows: 7 * queries, num_q_heads: heads, ..paged(16) };
        let packs = |problem: &Attention| {
            let prefill = HopperPrefill::of(problem, &device(true)).expect("the kernel takes it");
            (prefill.pack_gqa, prefill.num_packs(problem), prefill.queries_per_tile())
        };
        assert_eq!(packs(&problem), expected, "{queries} queries, {heads} heads");
        let group = heads as i64 / 2;
        let exact = group & -group;
        let long = Attention { queries: Queries { longest: 7 * queries, ..problem.queries }, ..problem };
        for other in [long, Attention { batch_invariant: true, ..problem }] {
            assert_eq!(packs(&other).0, exact, "{queries} queries, {heads} heads");
        }
        // Kernels with a logits transform have no padding heads.
        let mut capped = problem;
        capped.score.softcap = 30.0;
        assert!([exact, group].contains(&packs(&capped).0), "{queries} queries, {heads} heads");
    }
}

#[test]
fn the_tile_counter_is_in_the_workspace_or_null() {
    let plain = ragged();
    let prefill = HopperPrefill::of(&plain, &device(true)).expect("the kernel takes it");
    for (start, bytes, expected) in [(1 << 20, 8, 1 << 20), ((1 << 20) + 1, 15, (1 << 20) + 8), (1 << 20, 7, 0)] {
        let dims = [bytes];
        let workspace = Some(Tensor::dense(DType::U8, start as *mut u8, &dims));
        let problem = Attention { workspace, ..plain };
        assert_eq!(prefill.next_tile(&problem, 100, &device(true)) as usize, expected);
        // Six packs: every CTA has one tile.
        assert!(prefill.next_tile(&problem, 22, &device(true)).is_null());
    }
}

#[test]
fn head_dimensions_may_differ() {
    let plain = paged(16);
    let k = KvView { page_stride: 384 * 16, token_stride: 384, head_stride: 192, ..plain.k };
    let v = KvView { page_stride: 256 * 16, token_stride: 256, head_stride: 128, ..plain.k };
    let q = Tensor::dense(DType::BF16, null_mut(), &[1000, 12, 192]);
    let mut latent = Attention { q, k, v, head_dim: 192, ..plain };
    assert_eq!(first_kernel(&latent), "hopper_prefill_bf16_192x128_paged_none");
    latent.score.softcap = 30.0;
    assert_eq!(first_kernel(&latent), "hopper_prefill_bf16_192x128_paged_softcap_alibi");
}
