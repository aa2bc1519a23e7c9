//! Random small attention calls with any combination of options. The first of several choices is the plainest, so that
//! a failing case shrinks to a plain one.

use super::{Alibi, BatchSpec, Dtypes, KeyBounds, KvLayout, Mask, MaxSeqlenHints, MemoryLayout, Random, ScaleKind};

/// `(len_q, len_k)`: decode, prefill, chunked prefill, more queries than keys, or no query.
fn lengths(random: &mut Random) -> (usize, usize) {
    match random.below(6) {
        0 | 1 => (1, random.between(1, 119)),
        2 | 3 => {
            let len_q = random.between(1, 39);
            (len_q, len_q + random.below(60))
        }
        4 => (random.between(1, 29), random.below(20)),
        _ => (0, random.below(20)),
    }
}

fn window(random: &mut Random) -> i64 {
    match random.below(6) {
        0 | 1 => -1,
        2..=4 => random.below(50) as i64,
        _ => random.one_of(&[i64::MAX, 1 << 31, 1 << 32]),
    }
}

fn mask(random: &mut Random) -> Mask {
    match random.below(5) {
        0 => Mask::FULL,
        1 => Mask::CAUSAL,
        _ => Mask {
            causal: random.chance(50),
            window_left: window(random),
            window_right: window(random),
            top_left: random.chance(50),
            ..Mask::FULL
        },
    }
}

/// A batch without a mask, for all operators.
fn spec(random: &mut Random) -> BatchSpec {
    let heads = random.one_of(&[(1, 1), (2, 2), (4, 1), (9, 3), (8, 2), (6, 3), (16, 2)]);
    let eighths = random.between(1, 32);
    BatchSpec {
        dtypes: random.one_of(&Dtypes::ALL),
        heads,
        // Few heads if they are wide, because the reference is slow.
        head_dim: 8 * if heads.0 > 4 { eighths.div_ceil(3) } else { eighths },
        lengths: (0..random.below(6)).map(|_| lengths(random)).collect(),
        softcap: random.one_of(&[0.0, 0.0, 5.0, 50.0]),
        alibi: random.one_of(&[Alibi::Off, Alibi::Off, Alibi::PerHead, Alibi::PerSequence]),
        sinks: random.chance(50),
        scales: [(); 3]
            .map(|()| random.one_of(&[ScaleKind::None, ScaleKind::None, ScaleKind::PerTensor, ScaleKind::PerHead])),
        sharpness: random.one_of(&[1.0, 1.0, 4.0]),
        batch_invariant: random.chance(50),
        key_bounds: random.one_of(&[
            KeyBounds::None,
            KeyBounds::None,
            KeyBounds::Both,
            KeyBounds::Start,
            KeyBounds::End,
        ]),
        seed: random.below(1000) as u64,
        ..BatchSpec::default()
    }
}

fn paged_storage(random: &mut Random) -> MemoryLayout {
    MemoryLayout {
        page_size: random.one_of(&[1, 2, 5, 7, 16, 32, 64]),
        rows_around: (random.below(4), random.below(4)),
        spare_seqs: random.below(3),
        spare_entries: random.below(3),
        spare_pages: random.below(3),
        workspace: random.one_of(&[None, Some(0), Some(1000), Some(300_000)]),
        seed: random.below(1000) as u64,
        ..MemoryLayout::default()
    }
}

/// A random call of `paged_attention`.
pub fn paged_call(random: &mut Random) -> (BatchSpec, MemoryLayout) {
    let mask = if random.below(3) < 2 { Mask::CAUSAL } else { Mask::sliding(random.between(1, 49) as i64) };
    let tree = random.one_of(&[None, None, None, Some(40), Some(33), Some(8), Some(1), Some(0)]);
    (BatchSpec { tree, mask, ..spec(random) }, paged_storage(random))
}

/// A random call of `flash_attn_varlen`. Dv differs from D only where values have a separate buffer.
pub fn flash_call(random: &mut Random) -> (BatchSpec, MemoryLayout) {
    let layout = if random.below(6) == 0 { KvLayout::Contiguous } else { random.one_of(&KvLayout::ALL) };
    let mask = mask(random);
    let q_offset = !mask.top_left && random.chance(30);
    let spec = BatchSpec { mask, leftpad: random.chance(50), q_offset, ..spec(random) };
    let width = 8 * random.between(1, 32).div_ceil(spec.heads.0.div_ceil(4));
    let memory_layout = MemoryLayout {
        layout,
        seqused_q: random.chance(50),
        seqused_k: random.chance(50),
        hints: random.one_of(&[
            MaxSeqlenHints::Unknown,
            MaxSeqlenHints::RoundedUp,
            MaxSeqlenHints::TooSmall,
            MaxSeqlenHints::Huge,
        ]),
        ..paged_storage(random)
    };
    (BatchSpec { value_dim: layout.has_two_buffers().then_some(width), ..spec }, memory_layout)
}
