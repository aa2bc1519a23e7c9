mod batch;
mod definition;
mod numbers;
mod options;
mod shape;

use crate::cpu::simd::Isa;
use crate::pool::{Pool, SingleThread};
use crate::tensor::DType;
use batch::Batch;
use definition::Answer;
use numbers::Random;
use shape::{Shape, Storage};

/// Every helper is a thread of its own.
struct Threads(usize);

// SAFETY: a thread runs its task once.
unsafe impl Pool for Threads {
    fn num_threads(&self) -> usize {
        self.0
    }
    fn schedule(&self, task: fn(usize), argument: usize) {
        std::thread::spawn(move || task(argument));
    }
}

/// Against the definition, with every instruction set.
fn check(shape: Shape) {
    let batch = Batch::new(shape);
    for isa in Isa::available() {
        batch.check(isa, &Threads(2));
    }
}

const MIXED: &[(usize, usize)] = &[(1, 17), (5, 5), (40, 133), (1, 1), (0, 9), (3, 200)];

#[test]
fn every_dtype_and_head_dim_agrees_with_the_definition() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for d in [8, 24, 40, 64, 72, 128, 192, 256] {
            check(Shape { lengths: MIXED.into(), ..Shape::default() }.of(dtype).head_dims(d, d));
        }
    }
}

#[test]
fn every_group_size_and_page_size_agrees_with_the_definition() {
    for (q_heads, kv_heads) in [(3, 3), (2, 1), (6, 2), (8, 2), (5, 1), (16, 2), (20, 1), (140, 1)] {
        for page_size in [1, 7, 16] {
            let storage = Storage::Paged(page_size, 1);
            check(Shape { q_heads, kv_heads, storage, lengths: MIXED.into(), ..Shape::default() }.head_dims(16, 16));
        }
    }
}

#[test]
fn windows_and_soft_caps_agree_with_the_definition() {
    for window in [0, 1, 4, 30, 63, 99, i64::MAX] {
        for softcap in [0.0, 3.0] {
            let lengths = vec![(1, 300), (150, 150), (70, 400), (4, 190), (9, 3)];
            let shape = Shape { window: (window, 0), softcap, lengths, ..Shape::default() };
            check(Shape { storage: Storage::Paged(7, 1), ..shape }.head_dims(24, 24));
        }
    }
}

#[test]
fn any_ragged_batch_agrees_with_the_definition() {
    let mut random = Random(99);
    for seed in 0..60 {
        let lengths: Vec<(usize, usize)> = (0..=random.below(5))
            .map(|_| match random.below(3) {
                0 => (1, random.below(700)),
                1 => (random.below(12), random.below(300)),
                _ => (random.below(200), random.below(400)),
            })
            .collect();
        let kv_heads = 1 + random.below(3);
        let shape = Shape {
            q_heads: kv_heads * (1 + random.below(8)),
            kv_heads,
            storage: Storage::Paged(1 + random.below(40), 1),
            window: ([-1, -1, random.below(150) as i64][random.below(3)], 0),
            softcap: random.one_of(&[0.0, 0.0, 2.5]),
            lengths,
            rows_around: (0, random.below(70)),
            seed,
            ..Shape::default()
        };
        let d = 8 * (1 + random.below(10));
        check(shape.of(random.one_of(&[DType::F32, DType::F16, DType::BF16])).head_dims(d, d));
    }
}

#[test]
fn more_queries_than_keys_leave_the_first_rows_without_a_key() {
    check(Shape { lengths: vec![(9, 4), (60, 10), (3, 0), (100, 1)], ..Shape::default() });
}

#[test]
fn long_contexts_are_merged_from_pieces() {
    let shape = Shape { kv_heads: 4, q_heads: 8, lengths: vec![(1, 3000), (20, 2500)], ..Shape::default() };
    check(shape.clone().head_dims(128, 128));
    check(Shape { kv_heads: 1, q_heads: 3, window: (2299, 0), ..shape }.head_dims(256, 256));
}

#[test]
fn rows_of_no_sequence_are_zero_and_minus_infinity() {
    check(Shape { lengths: vec![], rows_around: (0, 3), ..Shape::default() });
    check(Shape { lengths: vec![(2, 5), (0, 0), (1, 9)], rows_around: (0, 200), ..Shape::default() });
}

/// Same bits, NaN included.
fn assert_same(a: &Answer, b: &Answer) {
    let bits = |x: &Answer| -> Vec<u64> { x.out.iter().chain(&x.lse).map(|x| x.to_bits()).collect() };
    assert_eq!(bits(a), bits(b));
}

#[test]
fn results_are_the_same_bits_for_any_number_of_threads() {
    let lengths = vec![(1, 4000), (1, 30), (7, 2000), (130, 1500)];
    for dtype in [DType::F32, DType::BF16] {
        let batch = Batch::new(Shape { q_heads: 8, lengths: lengths.clone(), ..Shape::default() }.of(dtype));
        for isa in Isa::available() {
            let alone = batch.run(isa, &SingleThread);
            for threads in [0, 2, 8, 64] {
                assert_same(&batch.run(isa, &Threads(threads)), &alone);
            }
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_whatever_surrounds_it() {
    let shape = Shape { q_heads: 6, storage: Storage::Paged(5, 1), ..Shape::default() }.head_dims(40, 40);
    let together = Batch::new(Shape { lengths: vec![(1, 1700), (50, 170), (4, 900)], ..shape });
    for isa in Isa::available() {
        let all = together.run_as(isa, &Threads(3), true);
        for b in 0..3 {
            // Only this sequence, in another slot, with its pages elsewhere in the pool and other rows before it.
            let (len_q, _) = together.shape.lengths[b];
            let first = together.cu_seqlens_q[b] as usize;
            let mut alone = together.clone();
            let page_len = 5 * 2 * 2 * 40;
            alone.k.splice(0..0, vec![f64::NAN; 2 * page_len]);
            alone.num_pages += 2;
            let entries = together.max_pages;
            let table: Vec<i32> =
                together.block_table[b * entries..][..entries].iter().map(|p| p.wrapping_add(2)).collect();
            alone.block_table[..entries].copy_from_slice(&table);
            alone.seqused_k[0] = together.seqused_k[b];
            alone.cu_seqlens_q[..2].copy_from_slice(&[first as i32 + 3, (first + len_q) as i32 + 3]);
            alone.query.splice(0..0, vec![f64::NAN; 3 * 6 * 40]);
            alone.num_seqs = 1;
            let found = alone.run_as(isa, &SingleThread, true);
            let (row, len) = (6 * 40, len_q * 6 * 40);
            assert_eq!(found.out[(first + 3) * row..][..len], all.out[first * row..][..len], "{isa:?} {b}");
        }
    }
}

#[test]
fn hostile_metadata_is_clamped_and_harms_only_its_own_rows() {
    let good = Batch::new(Shape { lengths: vec![(2, 20), (1, 33), (4, 11)], rows_around: (0, 2), ..Shape::default() });
    for isa in Isa::available() {
        let expected = good.run(isa, &SingleThread);
        let row_len = 4 * 64;
        let rows = |a: &Answer, rows: std::ops::Range<usize>| a.out[rows.start * row_len..rows.end * row_len].to_vec();

        let mut bad = good.clone();
        bad.seqused_k[1] = i32::MAX;
        bad.block_table[bad.max_pages] = i32::MIN;
        bad.block_table[bad.max_pages + 1] = i32::MAX;
        let found = bad.run(isa, &Threads(2));
        assert_eq!(rows(&found, 0..2), rows(&expected, 0..2));
        assert_eq!(rows(&found, 3..9), rows(&expected, 3..9));

        let mut bad = good.clone();
        bad.seqused_k[1] = i32::MIN;
        let found = bad.run(isa, &Threads(2));
        assert_eq!(rows(&found, 2..3), vec![0.0; row_len]);
        assert_eq!(rows(&found, 3..9), rows(&expected, 3..9));

        // Starts out of order are read as 2, 2, 3, 3: row 2 goes to the second sequence, the others to none.
        let mut bad = good.clone();
        bad.cu_seqlens_q[..4].copy_from_slice(&[2, 0, 3, i32::MIN]);
        let found = bad.run(isa, &Threads(2));
        assert_eq!(rows(&found, 0..2), vec![0.0; 2 * row_len]);
        assert!(rows(&found, 2..3).iter().all(|x| x.is_finite() && *x != 0.0));
        assert_eq!(rows(&found, 3..9), vec![0.0; 6 * row_len]);
        assert!(found.lse[3..9].iter().all(|x| *x == f64::NEG_INFINITY));

        for num_seqs in [0, -7, i32::MIN] {
            let found = Batch { num_seqs, ..good.clone() }.run(isa, &Threads(2));
            assert!(found.out.iter().all(|x| *x == 0.0) && found.lse.iter().all(|x| *x == f64::NEG_INFINITY));
        }
        // More than there are slots: the two spare slots hold garbage and lie behind the last row.
        let found = Batch { num_seqs: i32::MAX, ..good.clone() }.run(isa, &Threads(2));
        assert_eq!(rows(&found, 0..7), rows(&expected, 0..7));
    }
}

#[test]
fn rows_that_two_sequences_claim_are_those_of_the_first() {
    let good = Batch::new(Shape { lengths: vec![(8, 20), (0, 33)], ..Shape::default() });
    let mut bad = good.clone();
    bad.cu_seqlens_q[..4].copy_from_slice(&[0, 8, 4, 8]);
    bad.num_seqs = 3;
    bad.seqused_k[2] = 11;
    bad.block_table.copy_within(bad.max_pages..=bad.max_pages, 2 * bad.max_pages);
    for isa in Isa::available() {
        assert_eq!(bad.run(isa, &Threads(2)), good.run(isa, &Threads(4)));
    }
}

#[test]
fn what_is_planned_for_hostile_starts_is_no_more_than_for_right_ones() {
    // Each query is an item of its own.
    let (lengths, rows_around) = (vec![(1, 0); 600], (0, 0));
    let shape = Shape { q_heads: 256, kv_heads: 1, lengths, rows_around, ..Shape::default() };
    let right = Batch::new(shape.head_dims(8, 8));
    let rows = right.rows() as i32;
    let planned = right.planned();
    assert!(planned >= 600, "{planned}");
    for start in [|b: i32, rows: i32| b % 2 * rows, |b, rows| if b % 2 == 0 { b } else { rows }, |b, rows| rows - b] {
        let mut hostile = right.clone();
        let starts = 0..right.cu_seqlens_q.len() as i32;
        hostile.cu_seqlens_q = starts.map(|b| start(b, rows)).collect();
        assert!(hostile.planned() <= planned, "{} items and tasks, {planned} for right starts", hostile.planned());
    }
}

#[test]
fn a_row_without_keys_may_have_any_number_of_heads() {
    // K and V of a token are longer than a piece of an item: 2^19 elements.
    let (lengths, storage) = (vec![(1, 0), (1, 2), (0, 0)], Storage::Paged(1, 1));
    let shape = Shape { q_heads: 1025, kv_heads: 1025, lengths, storage, ..Shape::default() };
    check(shape.head_dims(256, 256));
}

#[test]
fn a_cache_without_pages_has_no_keys() {
    let mut batch = Batch::new(Shape { lengths: vec![(3, 20)], ..Shape::default() });
    batch.k.clear();
    batch.num_pages = 0;
    for isa in Isa::available() {
        let found = batch.run(isa, &Threads(2));
        assert!(found.out.iter().all(|x| *x == 0.0) && found.lse.iter().all(|x| *x == f64::NEG_INFINITY));
    }
}
