//! A case holds exactly the numbers of the batch that was stored in it.

use crate::support::{
    Alibi, Array, AttentionCase, AttentionRow, Batch, BatchSpec, Dtypes, F32, Head, InvalidMetadata, KvGeometry,
    KvLayout, Mask, MemoryLayout, ScaleKind, Score, SequenceData, attend, clamped_sequences, expected_rows,
};
use std::collections::BTreeSet;
use xla_attention::Op;

/// The reference's result, computed directly from the batch.
fn expected(batch: &Batch, sequence: &SequenceData, i: usize, head: usize) -> AttentionRow {
    let config = &batch.config;
    let (heads, kv_heads, d, dv) = (config.q_heads, config.kv_heads, config.head_dim, config.value_dim);
    let kv_head = head * kv_heads / heads;
    let &SequenceData { len_q, len_k, leftpad, .. } = sequence;
    let operands = Head {
        len_q,
        len_k,
        leftpad,
        bounds: Box::new(|_| (None, None)),
        tree: None,
        bias: None,
        dequantized: false,
        dims: [d, dv],
        query: Box::new(|i| &sequence.q[(i * heads + head) * d..][..d]),
        key: Box::new(|j| &sequence.k[(j * kv_heads + kv_head) * d..][..d]),
        value: Box::new(|j| &sequence.v[(j * kv_heads + kv_head) * dv..][..dv]),
    };
    let of = |scale: &Option<Vec<f32>>| match scale.as_deref() {
        None => 1.0,
        Some([whole]) => *whole,
        Some(per_head) => per_head[kv_head],
    };
    let score = Score {
        scales: [config.softmax_scale, of(&config.q_scale), of(&config.k_scale)],
        softcap: config.softcap,
        slope: (batch.alibi != Alibi::Off).then(|| sequence.slopes[head]),
        sink: config.sinks.as_ref().map(|s| s[head]),
        v_scale: of(&config.v_scale),
        mask: config.mask,
    };
    attend(&operands, i, &score)
}

#[test]
fn expected_rows_are_those_of_the_batch_in_every_memory_layout() {
    for layout in KvLayout::ALL {
        for (seqused, page_size) in [(false, 1), (true, 5), (true, 16)] {
            let two = layout.has_two_buffers();
            let spec = BatchSpec {
                dtypes: Dtypes::ALL[page_size % 9],
                head_dim: 8,
                value_dim: two.then_some(16),
                lengths: vec![(3, 20), (0, 4), (1, 9), (4, 2)],
                leftpad: seqused,
                mask: Mask::window(8, 2),
                softcap: 3.0,
                alibi: if seqused { Alibi::PerSequence } else { Alibi::PerHead },
                sinks: true,
                scales: [ScaleKind::PerTensor, ScaleKind::PerHead, ScaleKind::PerHead],
                ..BatchSpec::default()
            };
            let batch = spec.batch();
            let memory_layout =
                MemoryLayout { seqused_q: seqused, seqused_k: seqused, ..MemoryLayout::paged(layout, page_size) };
            let case = AttentionCase::flash(&batch, &memory_layout);
            assert!(clamped_sequences(&case).iter().all(|m| m.specified || m.len_q == 0), "{}", case.name);
            let expected_rows = expected_rows(&case, InvalidMetadata::Unspecified);
            let mut own = BTreeSet::new();
            for (index, sequence) in batch.sequences.iter().enumerate() {
                for (i, head) in (0..sequence.len_q).flat_map(|i| (0..4).map(move |h| (i, h))) {
                    let row = case.cu_seqlens_q[index] as usize + i;
                    own.insert(row);
                    let row = expected_rows[row][head].as_ref().unwrap();
                    assert_eq!(row.exact, expected(&batch, sequence, i, head), "{}", case.name);
                }
            }
            let padding_rows = (0..case.rows()).filter(|row| !own.contains(row));
            for row in padding_rows {
                assert_eq!(
                    expected_rows[row][0].as_ref().unwrap().exact,
                    AttentionRow::of_nothing(batch.config.value_dim, None)
                );
            }
        }
    }
}

#[test]
fn rows_of_a_layout_do_not_overlap() {
    for layout in KvLayout::ALL {
        let page_size = if layout == KvLayout::Contiguous { 1 } else { 4 };
        let kv_geometry = KvGeometry { layout, num_pages: 3, page_size, kv_heads: 2, dims: [8, 8] };
        let mut elements = vec![BTreeSet::new(); kv_geometry.shapes().len()];
        for (value, page, token, head) in (0..2)
            .flat_map(|v| (0..3).flat_map(move |p| (0..page_size).flat_map(move |t| [(v, p, t, 0), (v, p, t, 1)])))
        {
            let (buffer, at) = kv_geometry.element(value, page, token, head);
            assert!((at..at + 8).all(|e| elements[buffer].insert(e)), "{layout:?}: two rows in one place");
        }
        for (actual, dims) in elements.iter().zip(kv_geometry.shapes()) {
            assert_eq!(actual.len() as i64, dims.iter().product::<i64>());
            assert_eq!(*actual.last().unwrap(), actual.len() - 1);
        }
    }
    let kv_geometry = |layout| KvGeometry { layout, num_pages: 3, page_size: 4, kv_heads: 2, dims: [8, 8] };
    // Page 1, token 2, head 1: the rows of K and V.
    assert_eq!(kv_geometry(KvLayout::Split).element(0, 1, 2, 1), (0, ((4 + 2) * 2 + 1) * 8));
    assert_eq!(kv_geometry(KvLayout::Split).element(1, 1, 2, 1), (1, ((4 + 2) * 2 + 1) * 8));
    assert_eq!(kv_geometry(KvLayout::Interleaved).element(0, 1, 2, 1), (0, ((4 + 2) * 4 + 2) * 8));
    assert_eq!(kv_geometry(KvLayout::Interleaved).element(1, 1, 2, 1), (0, ((4 + 2) * 4 + 3) * 8));
    assert_eq!(kv_geometry(KvLayout::Stacked).element(1, 1, 2, 1), (0, (3 * 4 * 2 + (4 + 2) * 2 + 1) * 8));
    assert_eq!(kv_geometry(KvLayout::PerPage).element(1, 1, 2, 1), (0, ((2 + 1) * 4 * 2 + 2 * 2 + 1) * 8));
}

/// A small call without options.
fn small(target: Op, layout: KvLayout, seqused_k: bool) -> AttentionCase {
    let spec = BatchSpec { heads: (1, 1), head_dim: 8, lengths: vec![(2, 6), (3, 4)], ..BatchSpec::default() };
    let memory_layout = MemoryLayout { seqused_k, ..MemoryLayout::paged(layout, 2).bare() };
    AttentionCase::store(target, &spec.batch(), &memory_layout)
}

fn lengths(case: &AttentionCase) -> Vec<(usize, usize, usize, bool)> {
    clamped_sequences(case).iter().map(|m| (m.first_row, m.len_q, m.len_k, m.specified)).collect()
}

#[test]
fn metadata_is_clamped_as_documented() {
    let expected = vec![(0, 2, 6, true), (2, 3, 4, true)];
    let mut case = small(Op::PagedAttention, KvLayout::Interleaved, true);
    assert_eq!(lengths(&case), expected);
    for (num_seqs, sequences) in [(-3, 0), (i32::MIN, 0), (0, 0), (1, 1), (2, 2), (3, 2), (i32::MAX, 2)] {
        case.num_seqs = num_seqs;
        assert_eq!(lengths(&case), expected[..sequences]);
    }
    // Tables of three pages of two tokens hold six keys at most.
    case.seqused_k = Some(vec![7, -1]);
    assert_eq!(lengths(&case), [(0, 2, 6, false), (2, 3, 0, false)]);

    let mut case = small(Op::FlashAttnVarlen, KvLayout::Split, false);
    assert_eq!(lengths(&case), expected);
    case.cu_seqlens_k = vec![i32::MIN, i32::MAX, 0];
    assert_eq!(lengths(&case), [(0, 2, 6, false), (2, 3, 0, false)]);
    case.cu_seqlens_q = vec![-7, 2, 99];
    assert_eq!(lengths(&case), [(0, 2, 6, false), (2, 3, 0, false)]);
    case.cu_seqlens_q = vec![4, 1, 5];
    assert_eq!(lengths(&case), [(4, 0, 6, false), (4, 1, 0, false)]);

    let mut case = small(Op::FlashAttnVarlen, KvLayout::Contiguous, false);
    case.seqused_k = Some(vec![99, 4]);
    case.seqused_q = Some(vec![1, 99]);
    assert_eq!(lengths(&case), [(0, 1, 6, true), (2, 3, 4, true)]);
    case.seqused_k = Some(vec![3, -2]);
    case.seqused_q = Some(vec![-1, 2]);
    assert_eq!(lengths(&case), [(0, 0, 3, true), (2, 2, 0, false)]);
    case.leftpad_k = Some(vec![-4, 5]);
    case.seqused_k = Some(vec![2, 4]);
    assert_eq!(clamped_sequences(&case).iter().map(|m| (m.leftpad, m.len_k)).collect::<Vec<_>>(), [(0, 2), (4, 4)]);
}

#[test]
fn keys_that_no_query_attends_to_are_not_stored() {
    let finite = |array: &Array| array.values().iter().filter(|x| x.is_finite()).count();
    let keys = |spec: BatchSpec| {
        let case = AttentionCase::flash(
            &BatchSpec { heads: (1, 1), head_dim: 8, ..spec }.batch(),
            &MemoryLayout::contiguous(),
        );
        assert_eq!(finite(&case.kv[0]), finite(&case.kv[1]));
        finite(&case.kv[0]) / 8
    };
    let spec = |lengths, mask| BatchSpec { lengths, mask, ..BatchSpec::default() };
    assert_eq!(keys(spec(vec![(2, 20)], Mask::CAUSAL)), 20);
    assert_eq!(keys(spec(vec![(2, 20)], Mask::sliding(5))), 6);
    assert_eq!(keys(spec(vec![(2, 20)], Mask::CAUSAL.top_left())), 2);
    assert_eq!(keys(spec(vec![(0, 20)], Mask::FULL)), 0);
    assert_eq!(keys(spec(vec![(9, 4)], Mask::CAUSAL)), 4);
    let case = AttentionCase::flash(&spec(vec![(2, 20)], Mask::FULL).batch(), &MemoryLayout::contiguous());
    assert_eq!(finite(&case.q), 2 * 4 * 64);
    assert_eq!(case.config.dtypes, Dtypes::same(F32));
}
