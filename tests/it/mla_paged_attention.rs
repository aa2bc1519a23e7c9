//! `xla_gpu_mla_paged_attention` through its XLA FFI handlers and with guard pages, or on a GPU: agreement with the f64
//! reference, hostile metadata, isolation of NaN, batch invariance.

use crate::attention::metadata::corrupt;
use crate::support::{
    Array, AttentionCase, BF16, Batch, BatchSpec, Dtypes, F8E4M3FN, F16, F32, FP8_DTYPES, InvalidMetadata, KvLayout,
    Mask, MaxSeqlenHints, MemoryLayout, Numbers, ReferenceCase, ScaleKind, Side, assert_named_matches_reference,
    for_all, for_each_pool, latent_call, latent_workspace,
};

/// Decode, a prompt, a chunk, a sequence without queries, and more queries than keys.
const LENGTHS: [(usize, usize); 6] = [(1, 90), (9, 9), (0, 4), (21, 64), (1, 1), (5, 3)];

/// Query heads, D and Dv of small models, and of the largest ones.
const FORMS: [(usize, [usize; 2]); 6] =
    [(4, [48, 32]), (16, [576, 512]), (128, [40, 24]), (3, [64, 64]), (1, [8, 8]), (20, [264, 256])];

fn layout(page_size: usize) -> MemoryLayout {
    MemoryLayout { page_size, layout: KvLayout::Latent, ..MemoryLayout::default() }
}

#[test]
fn every_form_and_type_agrees_with_the_reference() {
    for (index, dtypes) in Dtypes::LATENT.into_iter().enumerate() {
        for (at, (heads, dims)) in FORMS.into_iter().enumerate() {
            let lengths = if heads == 128 { &LENGTHS[..3] } else { &LENGTHS[..] };
            let mask = [Mask::CAUSAL, Mask::FULL, Mask::sliding(20), Mask::window(7, 3)][(index + at) % 4];
            let spec = BatchSpec { mask, sinks: at % 2 == 0, ..BatchSpec::latent(dtypes, heads, dims, lengths) };
            let memory_layout = layout([1, 7, 16, 64][(index + at) % 4]);
            let name = format!("{heads} heads, {dims:?}");
            assert_named_matches_reference(&name, &mut AttentionCase::latent(&spec.batch(), &memory_layout));
        }
    }
}

#[test]
fn every_width_agrees_with_the_reference() {
    for (index, head_dim) in (8..=576_usize).step_by(8).enumerate() {
        let value_dim = [head_dim.min(512), 8, (head_dim / 2).next_multiple_of(8)][index % 3];
        let dtypes = Dtypes::LATENT[index % Dtypes::LATENT.len()];
        let spec = BatchSpec::latent(dtypes, 3, [head_dim, value_dim], &[(1, 37), (18, 25), (1, 3)]);
        AttentionCase::latent(&spec.batch(), &layout(16)).assert_matches_reference();
    }
}

#[test]
fn any_call_agrees_with_the_reference() {
    for_all(160, &|random| {
        let (spec, memory_layout) = latent_call(random);
        AttentionCase::latent(&spec.batch(), &memory_layout).assert_matches_reference();
    });
}

/// Few queries over many keys, which several CTAs divide between them, with room for all partials, for some, for none.
#[test]
fn long_sequences_agree_with_the_reference() {
    let forms = [(F32, 4, [64, 32]), (BF16, 16, [576, 512]), (F16, 40, [72, 64]), (BF16, 128, [80, 64])];
    for (dtype, heads, dims) in forms {
        for (index, mask) in Mask::BEYOND_BLOCKS.into_iter().enumerate() {
            let lengths = [(1, 1500), (2, 900), (1, 2), (0, 5), (3, 700)];
            let spec =
                BatchSpec { mask, sinks: index % 2 == 0, ..BatchSpec::latent(dtype.into(), heads, dims, &lengths) };
            let most = Some(latent_workspace());
            let workspace = [most, most, Some(2_000_000), None, Some(0), most][index];
            let memory_layout =
                MemoryLayout { workspace, rows_around: (3, 2), ..layout([16, 1, 64, 24, 7, 128][index]) };
            AttentionCase::latent(&spec.batch(), &memory_layout).assert_matches_reference();
        }
    }
}

/// Up to 16 packed rows per sequence on average, which have tiles of their own over 8-bit caches: sequences of several tiles, of
/// more blocks of keys than there are groups of warps, of fewer, and of none.
#[test]
fn few_packed_rows_agree_with_the_reference() {
    let scaled = [ScaleKind::None, ScaleKind::PerTensor, ScaleKind::None];
    for (index, dtypes) in Dtypes::LATENT.into_iter().enumerate() {
        for (at, (heads, queries, dims)) in
            [(16, 1, [576, 512]), (5, 3, [96, 64]), (8, 2, [576, 512])].into_iter().enumerate()
        {
            let lengths = [(queries + 2, 900), (1, 33), (0, 5), (0, 64), (1, 1), (queries, 300)];
            let mask = [Mask::CAUSAL, Mask::sliding(50), Mask::FULL, Mask::window(70, 3)][(index + at) % 4];
            let scales = if at == 1 { scaled } else { [ScaleKind::None; 3] };
            let softcap = if at == 2 { 20.0 } else { 0.0 };
            let spec = BatchSpec { mask, softcap, scales, ..BatchSpec::latent(dtypes, heads, dims, &lengths) };
            let workspace = if at == 1 { None } else { Some(latent_workspace()) };
            let memory_layout =
                MemoryLayout { workspace, rows_around: (0, 0), ..layout([16, 1, 64, 7][(index + at) % 4]) };
            let name = format!("{heads} heads, {queries} queries, {dims:?}");
            assert_named_matches_reference(&name, &mut AttentionCase::latent(&spec.batch(), &memory_layout));
        }
    }
}

#[test]
fn options_agree_with_the_reference() {
    let plain = |dtypes| BatchSpec::latent(dtypes, 6, [96, 64], &[(1, 700), (30, 64), (9, 2)]);
    let scaled = [ScaleKind::None, ScaleKind::PerTensor, ScaleKind::None];
    for dtypes in Dtypes::LATENT {
        for (name, spec) in [
            ("a soft cap", BatchSpec { softcap: 4.0, sharpness: 9.0, ..plain(dtypes) }),
            ("a scale and sinks", BatchSpec { scales: scaled, sinks: true, ..plain(dtypes) }),
            ("one key wins", BatchSpec { sharpness: 40.0, ..plain(dtypes) }),
            (
                "all of them",
                BatchSpec { softcap: 30.0, scales: scaled, sinks: true, mask: Mask::sliding(50), ..plain(dtypes) },
            ),
        ] {
            let memory_layout = MemoryLayout { workspace: Some(latent_workspace()), ..layout(16) };
            assert_named_matches_reference(name, &mut AttentionCase::latent(&spec.batch(), &memory_layout));
        }
        // Sinks that outweigh everything and nothing, and scores of any size.
        let sinks = Some(vec![f32::NEG_INFINITY, -1e30, 200.0, 1e30, 0.0, -3.0]);
        let batch = plain(dtypes).batch().with_config(|config| config.sinks = sinks);
        AttentionCase::latent(&batch, &layout(16)).assert_matches_reference();
        for (sharpness, scale) in [(100.0, 100.0), (300.0, 1.0), (1.0, 1e-4), (0.0, 1.0)] {
            let batch = BatchSpec { sharpness, ..plain(dtypes) }.batch();
            let batch = batch.with_config(|config| config.softmax_scale = scale);
            AttentionCase::latent(&batch, &layout(16)).assert_matches_reference();
        }
    }
}

#[test]
fn every_fp8_number_in_the_cache_has_its_value() {
    for (q, kv) in [F16, BF16].into_iter().flat_map(|q| FP8_DTYPES.map(|kv| (q, kv))) {
        let numbers: Vec<f64> =
            (0..=u8::MAX).map(|code| kv.decode(&[code])).map(|x| if x.is_finite() { x } else { 0.0 }).collect();
        let dtypes = Dtypes::over(q, kv);
        let mut batch = BatchSpec::latent(dtypes, 1, [256, 256], &vec![(1, 1); numbers.len()]).batch();
        for (i, sequence) in batch.sequences.iter_mut().enumerate() {
            sequence.q = (0..numbers.len()).map(|column| f64::from(u8::from(column == i))).collect();
            (sequence.k, sequence.v) = (numbers.clone(), numbers.clone());
        }
        // Logits of 57344 would exceed the precision of the lse.
        batch.config.softmax_scale = if kv == F8E4M3FN { 1.0 } else { 1.0 / 128.0 };
        let results = AttentionCase::latent(&batch, &layout(16)).assert_matches_reference();
        for row in results[0].values().chunks(numbers.len()).take(numbers.len()) {
            assert!(row == numbers, "{dtypes:?}: {row:?}");
        }
    }
}

#[test]
fn a_workspace_hints_and_num_seqs_do_not_change_what_is_computed() {
    for dtype in [F32, BF16] {
        let spec = BatchSpec::latent(dtype.into(), 16, [96, 64], &[(1, 1300), (9, 90), (1, 3)]);
        let batch = spec.batch();
        for workspace in [None, Some(0), Some(1), Some(4096), Some(300_001), Some(latent_workspace())] {
            let memory_layout = MemoryLayout { workspace, ..layout(16) };
            let with_lse = AttentionCase::latent(&batch, &memory_layout).assert_matches_reference();
            let without = AttentionCase::latent(&batch, &MemoryLayout { lse: false, ..memory_layout });
            assert!(without.assert_matches_reference()[0] == with_lse[0], "{workspace:?}");
        }
        for hints in [MaxSeqlenHints::RoundedUp, MaxSeqlenHints::TooSmall, MaxSeqlenHints::Huge] {
            AttentionCase::latent(&batch, &MemoryLayout { hints, ..layout(16) }).assert_matches_reference();
        }
        // Without `num_seqs` all slots are in use.
        let case = AttentionCase::latent(&batch, &MemoryLayout { spare_seqs: 0, ..layout(16) });
        let mut call = case.invocation();
        let expected = call.results(Side::EndsAtGuard);
        let at = call.operands.iter().position(|(name, _)| *name == "num_seqs").unwrap();
        call.operands[at].1 = Array::left_out(F32);
        assert!(call.results(Side::EndsAtGuard)[..2] == expected[..2]);
    }
}

#[test]
fn every_pool_gives_the_same_bits() {
    let lengths = [(1, 2500), (40, 300), (60, 700), (1, 90), (0, 4)];
    for dtype in [F32, F16, BF16] {
        let spec = BatchSpec::latent(dtype.into(), 8, [96, 64], &lengths);
        let case = AttentionCase::latent(&spec.batch(), &layout(16));
        let (expected, invocation) = (case.assert_matches_reference(), case.invocation());
        for_each_pool(|pool| {
            let results = invocation.run(Side::EndsAtGuard, pool).unwrap();
            assert!(case.computed(&results) == expected, "{dtype:?}");
        });
    }
}

#[test]
fn random_metadata_does_not_affect_sequences_with_valid_metadata() {
    for_all(128, &|random| {
        let (spec, memory_layout) = latent_call(random);
        let mut case = AttentionCase::latent(&spec.batch(), &memory_layout);
        corrupt(&mut case, random.next());
        case.compare_with_reference(InvalidMetadata::Unspecified);
    });
    // With split tiles.
    for seed in 0..12 {
        let lengths = [(3, 300), (1, 700), (2, 90), (1, 1300), (1, 17)];
        let spec = BatchSpec { seed, ..BatchSpec::latent(BF16.into(), 16, [96, 64], &lengths) };
        let memory_layout = MemoryLayout { workspace: Some(latent_workspace()), seed, ..layout(16) };
        let mut case = AttentionCase::latent(&spec.batch(), &memory_layout);
        corrupt(&mut case, seed);
        case.compare_with_reference(InvalidMetadata::Unspecified);
    }
}

/// The name of a change to the metadata of three sequences of 2, 3 and 4 queries and 32 keys each that fill their pages and
/// rows exactly, and the change.
type Change = (&'static str, fn(&mut AttentionCase));

const CHANGES: [Change; 18] = [
    ("an end past the last row", |c| c.cu_seqlens_q[3] = 10),
    ("an end of i32::MAX", |c| c.cu_seqlens_q[3] = i32::MAX),
    ("a start before the first row", |c| c.cu_seqlens_q[0] = -1),
    ("a start of i32::MIN", |c| c.cu_seqlens_q[0] = i32::MIN),
    ("a step back", |c| c.cu_seqlens_q = vec![0, 5, 3, 9]),
    ("from one end of i32 to the other", |c| c.cu_seqlens_q = vec![0, i32::MAX, i32::MIN, 9]),
    ("the end first", |c| c.cu_seqlens_q = vec![9, 0, 4, 9]),
    ("more keys than there are", |c| c.seqused_k = Some(vec![32, 33, i32::MAX])),
    ("fewer keys than none", |c| c.seqused_k = Some(vec![-1, 32, i32::MIN])),
    ("fewer keys than stored", |c| c.seqused_k = Some(vec![0, 1, 31])),
    ("more sequences than slots", |c| c.num_seqs = 4),
    ("i32::MAX sequences", |c| c.num_seqs = i32::MAX),
    ("-1 sequences", |c| c.num_seqs = -1),
    ("a start past the sequences in use", |c| (c.num_seqs, c.cu_seqlens_q[3]) = (2, i32::MAX)),
    ("a page past the pool", |c| replace_page(c, 5, 6)),
    ("page i32::MAX", |c| replace_page(c, 5, i32::MAX)),
    ("page -1", |c| replace_page(c, 0, -1)),
    ("page i32::MIN", |c| replace_page(c, 0, i32::MIN)),
];

fn replace_page(case: &mut AttentionCase, from: i32, to: i32) {
    *case.block_table.iter_mut().find(|id| **id == from).unwrap() = to;
}

#[test]
fn a_value_out_of_range_acts_as_the_nearest_one_in_range() {
    for dtypes in [Dtypes::same(F32), Dtypes::same(BF16), Dtypes::over(F16, F8E4M3FN)] {
        for (description, change) in CHANGES {
            let spec = BatchSpec::latent(dtypes, 4, [48, 32], &[(2, 32), (3, 32), (4, 32)]);
            let mut case = AttentionCase::latent(&spec.batch(), &layout(16).bare());
            change(&mut case);
            case.name = format!("{description}: {}", case.name);
            case.compare_with_reference(InvalidMetadata::Clamped);
        }
    }
}

#[test]
fn sequences_may_share_pages_and_be_out_of_use() {
    let spec = BatchSpec::latent(BF16.into(), 16, [96, 64], &[(1, 40), (1, 40), (3, 30)]);
    let mut case = AttentionCase::latent(&spec.batch(), &layout(16));
    let max_pages = case.max_pages;
    let (first, second) = case.block_table.split_at_mut(max_pages);
    second[..2].copy_from_slice(&first[..2]);
    for num_seqs in 0..=3 {
        case.num_seqs = num_seqs;
        case.compare_with_reference(InvalidMetadata::Unspecified);
    }
}

/// The rows of `out` of one sequence, as bytes.
fn rows_of(case: &AttentionCase, out: &Array, index: usize) -> Vec<u8> {
    let row = case.config.q_heads * case.config.value_dim * out.dtype.size();
    let [first, end] = [index, index + 1].map(|b| case.cu_seqlens_q[b] as usize * row);
    out.bytes[first..end].to_vec()
}

#[test]
fn a_sequence_full_of_nan_changes_no_bit_of_another() {
    let lengths = [(1, 30), (9, 40), (1, 900), (20, 23)];
    for (dtypes, mask) in Dtypes::LATENT.into_iter().flat_map(|d| [Mask::CAUSAL, Mask::window(25, 3)].map(|m| (d, m))) {
        let batch = BatchSpec { mask, ..BatchSpec::latent(dtypes, 5, [48, 32], &lengths) }.batch();
        let memory_layout = MemoryLayout { workspace: Some(latent_workspace()), ..layout(16) };
        let clean = AttentionCase::latent(&batch, &memory_layout);
        let expected = clean.assert_matches_reference();
        for (affected, of_queries) in (0..lengths.len()).flat_map(|affected| [(affected, true), (affected, false)]) {
            let mut bad = batch.clone();
            let sequence = &mut bad.sequences[affected];
            if of_queries {
                sequence.q.fill(f64::NAN);
            } else {
                sequence.k.fill(f64::NAN);
                sequence.v.fill(f64::NAN);
            }
            let results = AttentionCase::latent(&bad, &memory_layout).invocation().results(Side::EndsAtGuard);
            for index in (0..lengths.len()).filter(|index| *index != affected) {
                let same = rows_of(&clean, &results[0], index) == rows_of(&clean, &expected[0], index);
                assert!(same, "{dtypes:?}, {mask:?}: NaN of sequence {affected} reached {index}");
            }
        }
    }
}

#[test]
fn batch_invariant_rows_have_the_bits_of_their_sequence_alone() {
    let lengths = [(1, 1300), (20, 90), (1, 3), (3, 3), (1, 64)];
    for dtypes in Dtypes::LATENT {
        let spec = BatchSpec { batch_invariant: true, ..BatchSpec::latent(dtypes, 16, [96, 64], &lengths) };
        let batch = spec.batch();
        let attend = |batch: &Batch, memory_layout: &MemoryLayout| {
            let case = AttentionCase::latent(batch, memory_layout);
            let results = case.assert_matches_reference();
            (0..batch.sequences.len()).map(|index| rows_of(&case, &results[0], index)).collect::<Vec<_>>()
        };
        let expected = attend(&batch, &layout(16));
        let order = [4, 3, 2, 1, 0, 1, 2, 3, 4, 3, 2, 0];
        let sequences = order.map(|index| batch.sequences[index].clone()).to_vec();
        let crowd = MemoryLayout {
            rows_around: (5, 9),
            spare_entries: 40,
            workspace: Some(latent_workspace()),
            hints: MaxSeqlenHints::RoundedUp,
            ..layout(16)
        };
        let actual = attend(&Batch { sequences, ..batch.clone() }, &crowd);
        for (place, (rows, original)) in actual.iter().zip(order).enumerate() {
            assert!(*rows == expected[original], "{dtypes:?}: sequence {original} at place {place}");
        }
        for (index, rows) in expected.iter().enumerate() {
            assert!(attend(&batch.only(index), &crowd)[0] == *rows, "{dtypes:?}: sequence {index} alone");
        }
    }
}

#[test]
fn sizes_of_zero_are_valid() {
    for lengths in [&[][..], &[(0, 0)], &[(0, 7)], &[(5, 0)], &[(0, 0), (3, 0), (0, 3)]] {
        for (rows, spare, sinks) in [(0, 0, true), (3, 0, false), (0, 2, false), (3, 2, true)] {
            let spec = BatchSpec { sinks, ..BatchSpec::latent(BF16.into(), 4, [48, 32], lengths) };
            let sizes = MemoryLayout { rows_around: (0, rows), spare_seqs: spare, spare_pages: spare, ..layout(16) };
            let memory_layout = MemoryLayout { spare_entries: spare, ..sizes };
            AttentionCase::latent(&spec.batch(), &memory_layout).assert_matches_reference();
        }
    }
}

/// More sequences than a CTA of any kernel processes at once, with starts that do not ascend.
#[test]
fn starts_of_many_sequences_are_clamped() {
    for seed in 0..4 {
        let lengths: Vec<_> = (0..300).map(|b| (if b % 10 == 3 { 9 } else { 1 + b % 2 }, 1 + b % 9)).collect();
        let spec = BatchSpec { seed, ..BatchSpec::latent(F16.into(), 3, [24, 16], &lengths) };
        let workspace = if seed % 2 == 0 { None } else { Some(latent_workspace()) };
        let memory_layout = MemoryLayout { workspace, ..layout(16).bare() };
        let mut case = AttentionCase::latent(&spec.batch(), &memory_layout);
        case.disorder(false, seed);
        case.compare_with_reference(InvalidMetadata::Clamped);
    }
}
