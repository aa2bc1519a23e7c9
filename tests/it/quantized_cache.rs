//! Caches of i8 and f8e4m3fn with a scale per row, against the reference on every device. Scales that no row of a sequence
//! reads are NaN and infinities in every call.

use crate::attention::Operator;
use crate::attention::metadata::corrupt;
use crate::attention::results::assert_same_bits_alone;
use crate::support::{
    ALIBI, ATTENTION_DTYPES, Array, AttentionCase, BF16, BatchSpec, CacheUpdateCase, Dtype, Dtypes, F8E4M3FN, F8E5M2,
    F16, F32, GatherCase, I8, InlinePool, InvalidMetadata, KeyBounds, KvLayout, Mask, MemoryLayout, Numbers,
    PagedUpdateCase, Random, ReferenceCase, SCALED_DTYPES, SMALLEST_ROW, ScaleKind, Side,
    assert_named_matches_reference, dims_of, for_each_side, paged_call, put_scale, quantize_row, runs_on_cpu,
    skips_slow_test,
};

/// Layouts of a cache in one buffer.
const LAYOUTS: [KvLayout; 3] = [KvLayout::Interleaved, KvLayout::Stacked, KvLayout::PerPage];

/// Decode, chunks of prefill of a tile and more, more queries than keys, no queries, and many keys.
const LENGTHS: [(usize, usize); 9] =
    [(1, 1), (9, 200), (1, 400), (70, 90), (12, 7), (1, 33), (0, 5), (5, 1700), (150, 300)];

const HEADS: [(usize, usize); 6] = [(4, 2), (3, 1), (2, 2), (8, 1), (8, 2), (16, 1)];

fn spec(seed: usize) -> BatchSpec {
    BatchSpec {
        dtypes: Dtypes::SCALED[seed % 6],
        heads: HEADS[(seed / 2 + seed / 6) % 6],
        head_dim: [64, 128, 40, 256, 96, 192, 8, 80, 512, 320][(seed / 6 + seed) % 10],
        lengths: LENGTHS.to_vec(),
        mask: if seed % 3 == 1 { Mask::sliding(24) } else { Mask::CAUSAL },
        softcap: if seed % 5 == 2 { 2.5 } else { 0.0 },
        alibi: ALIBI[seed / 4 % ALIBI.len()],
        sinks: seed.is_multiple_of(2),
        scales: [
            [ScaleKind::None, ScaleKind::PerTensor, ScaleKind::PerHead][seed / 5 % 3],
            ScaleKind::None,
            ScaleKind::None,
        ],
        batch_invariant: seed % 4 == 3,
        seed: seed as u64,
        ..BatchSpec::default()
    }
}

fn layout(seed: usize) -> MemoryLayout {
    MemoryLayout {
        page_size: [16, 7, 32, 1, 64][seed % 5],
        rows_around: (3, 5),
        workspace: [Some(9_000_001), Some(300_000), None][seed / 3 % 3],
        lse: seed % 7 != 6,
        seed: seed as u64,
        ..MemoryLayout::paged(KvLayout::Interleaved, 16)
    }
}

fn assert_matches_reference(spec: &BatchSpec, layout: &MemoryLayout) {
    let mut case = AttentionCase::paged(&spec.batch(), layout);
    assert_named_matches_reference(&format!("{spec:?}, {layout:?}"), &mut case);
}

#[test]
fn every_option_agrees_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    for seed in 0..36 {
        assert_matches_reference(&spec(seed), &layout(seed));
    }
}

#[test]
fn decode_of_every_type_and_width_agrees_with_the_reference() {
    let lengths = vec![(1, 700), (3, 40), (1, 16), (1, 1), (2, 130)];
    for (index, head_dim) in [8, 16, 64, 72, 96, 128, 192, 256, 320, 512].into_iter().enumerate() {
        for dtypes in Dtypes::SCALED {
            let heads = [(1, 1), (8, 2), (9, 3), (16, 2), (32, 4)][index % 5];
            let spec = BatchSpec { dtypes, head_dim, heads, lengths: lengths.clone(), ..BatchSpec::default() };
            assert_matches_reference(&spec, &layout(index));
        }
    }
}

#[test]
fn sharp_rows_agree_with_the_reference() {
    for (seed, dtypes) in Dtypes::SCALED.into_iter().enumerate() {
        assert_matches_reference(&BatchSpec { dtypes, sharpness: 6.0, ..spec(seed) }, &layout(seed));
    }
}

/// What only the CPU has: wide heads, bounds of keys, and trees.
#[test]
fn every_other_option_agrees_with_the_reference_on_the_cpu() {
    if !runs_on_cpu() || skips_slow_test() {
        return;
    }
    for seed in 0..18 {
        let options = match seed % 3 {
            0 => BatchSpec { head_dim: [320, 512][seed / 3 % 2], ..spec(seed) },
            1 => BatchSpec { key_bounds: KeyBounds::ALL[1 + seed / 3 % 3], ..spec(seed) },
            _ => BatchSpec { tree: Some([40, 64, 70, 200][seed / 3 % 4]), ..spec(seed) },
        };
        assert_matches_reference(&options, &layout(seed));
    }
}

#[test]
fn any_call_agrees_with_the_reference() {
    crate::support::for_all(if runs_on_cpu() { 300 } else { 100 }, &|random| {
        let (spec, memory_layout) = paged_call(random);
        let dtypes = random.one_of(&Dtypes::SCALED);
        let scales = [spec.scales[0], ScaleKind::None, ScaleKind::None];
        let mut spec = BatchSpec { dtypes, scales, ..spec };
        if !runs_on_cpu() {
            spec = BatchSpec { tree: None, key_bounds: KeyBounds::None, ..spec };
        }
        let mut case = AttentionCase::paged(&spec.batch(), &memory_layout);
        assert_named_matches_reference(&format!("{spec:?}"), &mut case);
        let mut case = AttentionCase::paged(&spec.batch(), &memory_layout);
        corrupt(&mut case, random.next());
        case.compare_with_reference(InvalidMetadata::Unspecified);
    });
}

#[test]
fn an_update_and_attention_agree_with_the_reference_and_with_two_calls() {
    for seed in 0..12 {
        PagedUpdateCase::new(&spec(seed).batch(), &layout(seed)).assert_matches_reference();
    }
    let short = vec![(1, 1), (1, 17), (1, 700), (2, 2), (1, 64), (3, 90), (1, 33), (4, 650), (5, 3), (0, 4), (1, 48)];
    for (seed, dtypes) in Dtypes::SCALED.into_iter().enumerate() {
        let spec = BatchSpec { dtypes, heads: (8, 2), head_dim: 128, lengths: short.clone(), ..spec(seed) };
        PagedUpdateCase::new(&spec.batch(), &layout(seed)).assert_matches_reference();
    }
}

#[test]
fn an_update_takes_rows_of_every_wider_type() {
    for (q, kv) in [F16, BF16].into_iter().flat_map(|q| SCALED_DTYPES.map(|kv| (q, kv))) {
        for rows in ATTENTION_DTYPES {
            let lengths = vec![(9, 9), (1, 90), (21, 64), (0, 4)];
            let spec = BatchSpec { dtypes: Dtypes::scaled(q, kv, q), lengths, ..BatchSpec::default() };
            PagedUpdateCase::of_rows(&spec.batch(), &MemoryLayout::default(), rows).assert_matches_reference();
        }
    }
}

#[test]
fn updates_write_the_codes_and_scales_of_the_reference_in_every_type_and_layout() {
    for layout in LAYOUTS {
        for dtype in ATTENTION_DTYPES {
            for (index, kv) in SCALED_DTYPES.into_iter().enumerate() {
                for (heads, d) in [(2, 16), (1, 8), (3, 128), (8, 64), (5, 72), (2, 512), (4, 256), (1, 136)] {
                    let case = CacheUpdateCase {
                        layout,
                        dtype,
                        fp8: Some(kv),
                        scaled: true,
                        heads,
                        dims: [d; 2],
                        slots: vec![7, -1, 0, 12, 11, 4, i64::from(i32::MAX)],
                        wide_slots: index == 1,
                        seed: (heads + d) as u64,
                        ..CacheUpdateCase::default()
                    };
                    case.assert_matches_reference();
                }
            }
        }
    }
    // No token, no slot and no page.
    for (num_pages, page_size, slots) in [(3, 4, vec![]), (0, 4, vec![0, 5]), (3, 0, vec![1]), (1, 1, vec![0])] {
        let case =
            CacheUpdateCase { fp8: Some(I8), scaled: true, num_pages, page_size, slots, ..CacheUpdateCase::default() };
        case.assert_matches_reference();
    }
}

/// Rows of `d` numbers of every kind: zeros, a NaN or an infinity in any place, numbers around every boundary, subnormal
/// and huge ones, and any bits.
fn rows_of_every_kind(dtype: Dtype, d: usize) -> Vec<f64> {
    let mut random = Random::new(7);
    let mut rows = vec![];
    let nan = [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    rows.extend([vec![0.0; d], vec![-0.0; d]]);
    for x in nan {
        for at in [0, 1, d / 2, d - 1] {
            let mut row: Vec<f64> = (0..d).map(|_| random.normal()).collect();
            row[at] = x;
            rows.push(row);
        }
    }
    // Ties and their neighbours in i8 and in e4m3fn: the largest magnitude is that of the largest code.
    for (largest, step) in [(127.0, 0.5), (448.0, 0.0625), (448.0, 0.000_976_562_5), (127.0 * 1024.0, 512.0)] {
        for sign in [1.0, -1.0] {
            let mut row: Vec<f64> = (0..d).map(|i| sign * step * i as f64).collect();
            row[d - 1] = largest;
            rows.push(row);
        }
    }
    for exponent in [-149, -126, -101, -100, -99, -60, -24, -14, 0, 15, 60, 127] {
        let size = f64::from(exponent).exp2();
        rows.push((0..d).map(|_| size * (random.unit() - 0.5) * 1.9).collect());
        rows.push((0..d).map(|i| if i == 3 { size } else { 0.0 }).collect());
        rows.push((0..d).map(|i| if i == 5 { -size * 1.37 } else { size * random.normal() / 4.0 }).collect());
    }
    for _ in 0..40 {
        rows.push((0..d).map(|_| f64::from(f32::from_bits(random.next() as u32))).collect());
        rows.push((0..d).map(|_| 1000.0 * random.normal()).collect());
    }
    rows.concat().into_iter().map(|x| dtype.round(x)).collect()
}

#[test]
fn rows_of_every_kind_are_quantized_as_the_reference_does_it() {
    for (dtype, kv) in ATTENTION_DTYPES.into_iter().flat_map(|dtype| SCALED_DTYPES.map(|kv| (dtype, kv))) {
        for d in [8, 64, 128, 136] {
            let values = rows_of_every_kind(dtype, d);
            let rows = values.len() / d;
            let array = Array::new(dtype, &dims_of(&[rows, 1, d]), &values);
            let case = CacheUpdateCase {
                dtype,
                fp8: Some(kv),
                scaled: true,
                num_pages: 1,
                page_size: rows,
                heads: 1,
                dims: [d; 2],
                slots: (0..rows as i64).rev().collect(),
                ..CacheUpdateCase::default()
            };
            let expected = case.expected_of(&[array.clone(), array.clone()]);
            let call = case.invocation(true).with_operand("key", array.clone()).with_operand("value", array);
            for_each_side(|side| {
                let found = call.results(side);
                for row in 0..2 * rows {
                    let [code, scale] = [d, F32.size()].map(|size| row * size..(row + 1) * size);
                    let of = |arrays: &[Array]| {
                        (arrays[0].bytes[code.clone()].to_vec(), arrays[1].bytes[scale.clone()].to_vec())
                    };
                    assert_eq!(
                        of(&found),
                        of(&expected),
                        "{dtype:?} in {kv:?}: {:?}",
                        &values[(rows - 1 - row / 2) * d..][..d]
                    );
                }
            });
        }
    }
}

#[test]
fn the_error_of_a_quantized_number_is_bounded() {
    let mut random = Random::new(3);
    for _ in 0..2000 {
        let size = (f64::from(random.below(60) as i32) - 30.0).exp2();
        let row: Vec<f64> = (0..128).map(|_| F32.round(size * random.normal())).collect();
        let largest = row.iter().fold(0.0f64, |a, x| a.max(x.abs()));
        for dtype in SCALED_DTYPES {
            let (codes, scale) = quantize_row(dtype, &row);
            for (x, code) in row.iter().zip(codes) {
                let error = (x - dtype.decode(&[code]) * f64::from(scale)).abs();
                // The bounds of docs/quantized_cache.md, and roundings in f32.
                let bound = if dtype == I8 { largest / 254.0 } else { (x.abs() / 16.0).max(largest / 448.0 / 1024.0) };
                assert!(error <= bound * (1.0 + 1e-6) + x.abs() * 1e-6, "{dtype:?}: {x} of {largest}: {error}");
            }
        }
    }
    assert!(quantize_row(I8, &[SMALLEST_ROW; 8]).1 > 0.0 && quantize_row(I8, &[SMALLEST_ROW / 2.0; 8]).1 == 0.0);
}

#[test]
fn gathered_rows_are_codes_times_scales() {
    let mut seed = 0;
    for (layout, dtype) in LAYOUTS.into_iter().flat_map(|layout| SCALED_DTYPES.map(|dtype| (layout, dtype))) {
        for out in ATTENTION_DTYPES {
            for (heads, d, page_size) in
                [(2, 16, 4), (1, 8, 1), (3, 128, 16), (8, 64, 3), (5, 72, 8), (2, 512, 2), (4, 136, 5)]
            {
                seed += 1;
                let capacity = [17, 60, 3][seed as usize % 3];
                let lens = vec![2 * page_size as i32 + 1, 0, page_size as i32, i32::MAX, -5];
                let tables = vec![3, 1, 4, 0, 2, 2, 4, 4, 0, 99, -1, 2, 1, 1, 1];
                let case = GatherCase {
                    layout,
                    dtype,
                    out,
                    heads,
                    dims: [d; 2],
                    page_size,
                    capacity,
                    lens,
                    tables,
                    scaled: true,
                    seed,
                    ..GatherCase::default()
                };
                case.assert_matches_reference();
            }
        }
    }
}

#[test]
fn a_gathered_cache_gives_the_numbers_that_attention_reads() {
    // f32 holds the product of a code and a scale of few bits exactly.
    for (dtype, d) in [(I8, 64), (F8E4M3FN, 128)] {
        let case = GatherCase { dtype, scaled: true, dims: [d; 2], lens: vec![9, 0, 6], ..GatherCase::default() };
        case.assert_matches_reference();
    }
}

/// The scale of the last key of the only sequence is NaN, which its causal mask hides from all queries but the last. The
/// definition lets it spread to other rows of the sequence; on the CPU it does not.
#[test]
fn a_nan_in_a_scale_of_a_key_does_not_reach_rows_that_do_not_attend_to_it_on_the_cpu() {
    if !runs_on_cpu() {
        return;
    }
    for (seed, dtypes) in Dtypes::SCALED.into_iter().enumerate() {
        for (len_q, len_k, heads) in [(8, 8, (4, 2)), (3, 40, (8, 2)), (2, 700, (4, 4)), (100, 130, (4, 1))] {
            let spec =
                BatchSpec { dtypes, heads, lengths: vec![(len_q, len_k)], seed: seed as u64, ..BatchSpec::default() };
            let case = AttentionCase::paged(&spec.batch(), &MemoryLayout::default().bare());
            let expected = case.invocation().results(Side::EndsAtGuard);
            for value in 0..2 {
                let mut with_nan = case.clone();
                let (geometry, last) = (&case.kv_geometry, len_k - 1);
                let page = case.block_table[last / geometry.page_size] as usize;
                let scales = with_nan.scale_cache.as_mut().expect("scales");
                for head in 0..heads.1 {
                    let scale = geometry.scale_at(value, page, last % geometry.page_size, head);
                    put_scale(scales, scale, f32::NAN);
                }
                let found = with_nan.invocation().results(Side::EndsAtGuard);
                let row = heads.0 * spec.head_dim * dtypes.out.size();
                let others = (len_q - 1) * row;
                assert!(found[0].bytes[..others] == expected[0].bytes[..others], "{dtypes:?}: {spec:?}");
                assert!(found[0].values()[others / dtypes.out.size()..].iter().all(|x| x.is_nan()), "{spec:?}");
            }
        }
    }
}

#[test]
fn rows_have_the_bits_of_their_sequence_alone_with_batch_invariant() {
    for (seed, dtypes) in Dtypes::SCALED.into_iter().enumerate() {
        let lengths = vec![(5, 1700), (9, 200), (1, 1300), (1, 1100), (3, 3), (140, 160)];
        let spec = BatchSpec { dtypes, lengths, batch_invariant: true, ..spec(seed) };
        let batch = spec.batch();
        let layouts =
            [None, Some(300_000), Some(9_000_001)].map(|workspace| MemoryLayout { workspace, lse: true, ..layout(0) });
        assert_same_bits_alone(Operator::PagedAttention, &batch, &layouts, &format!("{dtypes:?}"));
    }
}

/// Up to 8 packed rows per sequence on average have tiles of 8 rows; the longer sequences have several of these in the batch,
/// and one of 16 rows alone.
#[test]
fn tiles_of_8_rows_have_the_bits_of_larger_ones_with_batch_invariant() {
    let without_scales = [F8E4M3FN, F8E5M2].map(|kv| Dtypes::over(BF16, kv));
    for (index, dtypes) in Dtypes::SCALED.into_iter().chain(without_scales).enumerate() {
        for head_dim in [64, 128, 256] {
            let lengths: Vec<_> = [(1, 40); 12].into_iter().chain([(7, 1700), (5, 300), (8, 70)]).collect();
            let mask = if index % 2 == 0 { Mask::CAUSAL } else { Mask::sliding(24) };
            let spec = BatchSpec { dtypes, lengths, head_dim, mask, heads: (4, 2), ..BatchSpec::default() };
            let batch = BatchSpec { softcap: [0.0, 2.5][index / 2 % 2], batch_invariant: true, ..spec }.batch();
            let layouts = [300_000, 9_000_001].map(|bytes| MemoryLayout { workspace: Some(bytes), ..layout(0) });
            assert_same_bits_alone(Operator::PagedAttention, &batch, &layouts, &format!("{dtypes:?}, {head_dim}"));
        }
    }
}

/// A scale of 1 in every row, and codes that are those of a cache without scales.
#[test]
fn scales_of_1_give_what_a_cache_without_scales_gives() {
    for q in [F16, BF16] {
        let lengths = vec![(1, 300), (9, 40), (70, 70)];
        let plain = BatchSpec { dtypes: Dtypes::over(q, F8E4M3FN), lengths, ..BatchSpec::default() };
        let case = AttentionCase::paged(&plain.batch(), &MemoryLayout::default());
        let mut scaled = case.clone();
        let dims = case.kv_geometry.scale_dims();
        scaled.scale_cache = Some(Array::filled(F32, &dims, 0));
        let ones = scaled.scale_cache.as_mut().expect("scales");
        (0..ones.values().len()).for_each(|index| put_scale(ones, index, 1.0));
        let [expected, found] = [&case, &scaled].map(|case| case.invocation().results(Side::EndsAtGuard));
        let largest =
            expected[0].values().iter().zip(found[0].values()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(largest < 0.01, "{q:?}: {largest}");
    }
}

/// Codes of -128, which no update writes, are -128.
#[test]
fn every_code_of_i8_is_its_number() {
    let batch = BatchSpec { dtypes: Dtypes::SCALED[0], head_dim: 128, ..BatchSpec::default() }.batch();
    for seed in 0..4 {
        let mut case = AttentionCase::paged(&batch, &layout(seed));
        let mut random = Random::new(seed as u64);
        for code in &mut case.kv[0].bytes {
            let any = random.next() as u8;
            *code = random.one_of(&[0x80, 0x80, 0x7f, 0x81, any]);
        }
        // Weights that differ but little, so that no key stands alone.
        case.config.softmax_scale = 1e-3;
        case.kv_values = vec![crate::support::dequantized(&case.kv[0], case.scale_cache.as_ref().expect("scales"))];
        case.compare_with_reference(InvalidMetadata::Unspecified);
    }
}

#[test]
fn strided_caches_and_scales_give_the_results_of_dense_ones() {
    if !runs_on_cpu() {
        return;
    }
    for seed in 0..6 {
        let update = PagedUpdateCase::new(&spec(seed).batch(), &layout(seed));
        let gather =
            GatherCase { dtype: SCALED_DTYPES[seed % 2], scaled: true, seed: seed as u64, ..GatherCase::default() };
        for call in [update.invocation(true), update.attention.invocation(), gather.invocation()] {
            let gap = |name: &str| if ["kv_cache", "k_cache", "kv_scale_cache"].contains(&name) { 8 } else { 0 };
            let found = call.run_strided(Side::EndsAtGuard, &InlinePool(1), gap).expect("a valid call");
            let expected = call.results(Side::EndsAtGuard);
            let same = |a: &Array, b: &Array| {
                a == b
                    || a.values()
                        .iter()
                        .zip(b.values())
                        .all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
            };
            assert!(found.iter().zip(&expected).all(|(a, b)| same(a, b)), "{}", call.description);
        }
    }
}
