//! Which calls Hopper's gradients up to 128 columns take, and the workspace that they need.

use super::*;
use crate::cuda::attention::tests::{device, problem};
use crate::problem::attention::{Alibi, Bias, KeyRanges};
use crate::problem::workspace::{AttentionSizes, BiasSizes, FEW_HEAD_SPLIT_TILES, head_splits, max_head_splits};
use crate::problem::{KvView, Op};
use crate::tensor::{DType, Tensor};
use std::ptr::{dangling, null, null_mut};

/// 1000 rows of 4 heads over 2 KV heads and as many keys, in 7 sequences, without memory.
pub(in super::super) fn gradients(head_dim: usize) -> FlashAttnVarlenBwd<'static> {
    let leak = |heads: usize| -> &'static [i64] { Box::leak(Box::new([1000, heads as i64, head_dim as i64])) };
    let query_tensor = Tensor::dense(DType::BF16, null_mut(), leak(4));
    let key_tensor = Tensor::dense(DType::BF16, null_mut(), leak(2));
    let base = problem(1000, 7, 4, head_dim);
    let view = KvView { token_stride: 2 * head_dim as i64, head_stride: head_dim as i64, ..base.k };
    let forward = Attention { q: query_tensor, k: view, v: view, out: query_tensor, ..base };
    FlashAttnVarlenBwd {
        forward,
        dout: query_tensor,
        dlse: None,
        dq: query_tensor,
        dk: key_tensor,
        dv: key_tensor,
        dsinks: None,
        dbias: None,
        workspace: Some(Tensor::dense(DType::U8, null_mut(), &[4_000_000])),
        num_keys: 1000,
        deterministic: false,
    }
}

#[test]
fn the_kernels_take_what_they_are_built_for() {
    let takes = |problem: &FlashAttnVarlenBwd| HopperBackward::of(problem, &device(true)).is_some();
    for head_dim in (8..=256).step_by(8) {
        assert_eq!(takes(&gradients(head_dim)), head_dim <= 128, "{head_dim}");
    }
    assert!(HopperBackward::of(&gradients(128), &device(false)).is_none());
    let with = |change: &dyn Fn(&mut Attention)| {
        let mut problem = gradients(128);
        change(&mut problem.forward);
        takes(&problem)
    };
    assert!(with(&|forward| forward.score = Score { window_left: 5, window_right: 0, ..forward.score }));
    assert!(with(&|forward| forward.score.window_left = i64::MAX));
    assert!(!with(&|forward| forward.score.window_left = 1 << 30));
    let alibi = Some(Alibi { slopes: null(), per_sequence: false });
    assert!(with(&|forward| forward.score.softcap = 1.0));
    assert!(with(&|forward| forward.score.alibi = alibi));
    assert!(!with(&|forward| forward.score = Score { softcap: 1.0, alibi, ..forward.score }));
    let key_ranges = KeyRanges { start: None, end: Some(dangling()) };
    assert!(with(&|forward| forward.queries.key_ranges = key_ranges));
    let both = |forward: &mut Attention| {
        forward.queries.key_ranges = key_ranges;
        forward.score.softcap = 1.0;
    };
    assert!(!with(&both));
    let bias = Bias { data: null(), dtype: DType::BF16, seqs: 1, heads: 1, rows: 9, keys: 16 };
    let takes_bias = |bias| with(&|forward| forward.score.bias = Some(bias));
    assert!(takes_bias(bias));
    assert!(takes_bias(Bias { seqs: 7, heads: 4, rows: 10, ..bias }));
    assert!(takes_bias(Bias { keys: 17, ..bias }));
    assert!(!takes_bias(Bias { keys: 400_001, ..bias }));
    assert!(!takes_bias(Bias { rows: 0, ..bias }));
    assert!(takes_bias(Bias { dtype: DType::F32, ..bias }));
    let capped_bias =
        |forward: &mut Attention| forward.score = Score { bias: Some(bias), softcap: 1.0, ..forward.score };
    assert!(!with(&capped_bias));
    let stores_dbias = |dtype, seqs| {
        let mut problem = gradients(128);
        problem.forward.score.bias = Some(Bias { seqs, heads: 4, ..bias });
        problem.dbias = Some(Tensor::dense(dtype, null_mut(), &[7, 4, 9, 16]));
        takes(&problem)
    };
    assert!(stores_dbias(DType::BF16, 7));
    assert!(!stores_dbias(DType::F32, 7));
    assert!(stores_dbias(DType::F32, 1));
    assert!(!with(&|forward| forward.q.dtype = DType::F32));
    assert!(!with(&|forward| forward.k.token_stride = 260));
    assert!(!with(&|forward| forward.v.token_stride = 0));
    let large_workspace = |bytes: &'static [i64; 1]| FlashAttnVarlenBwd {
        workspace: Some(Tensor::dense(DType::U8, null_mut(), bytes)),
        ..gradients(128)
    };
    assert!(takes(&large_workspace(&[4_000_000])) && !takes(&large_workspace(&[2_000_000])));
    assert!(!takes(&FlashAttnVarlenBwd { workspace: None, ..gradients(128) }));
    let wide = |tensor| Tensor { dtype: DType::F32, ..tensor };
    let FlashAttnVarlenBwd { dq, dk, dv, .. } = gradients(128);
    assert!(takes(&FlashAttnVarlenBwd { dq: wide(dq), dk: wide(dk), dv: wide(dv), ..gradients(128) }));
}

#[test]
fn a_bias_whose_rows_tma_does_not_load_is_copied() {
    let kernels_with_rows = |of_bias, head_dim, window_right, [rows, keys]: [usize; 2], seqs, dtype| {
        let mut problem = gradients(head_dim);
        let bias = Some(Bias { data: null(), dtype: of_bias, seqs, heads: 4, rows, keys });
        problem.forward.score = Score { window_right, bias, ..problem.forward.score };
        problem.dbias = Some(Tensor::dense(dtype, null_mut(), &[]));
        let launches = HopperBackward::of(&problem, &device(true)).map(|of| of.launches(&problem, device(true)));
        let launches = launches.transpose().expect("there are kernels").unwrap_or_default();
        // Query heads may be split.
        let kernels = launches.iter().map(|launch| launch.kernel).filter(|kernel| *kernel != "hopper_bwd_combine");
        kernels.collect::<Vec<_>>()
    };
    let kernels_of = |head_dim, window_right, keys, seqs, dtype| {
        kernels_with_rows(DType::BF16, head_dim, window_right, [9, keys], seqs, dtype)
    };
    let kernels = |keys, seqs, dtype| kernels_of(128, -1, keys, seqs, dtype);
    let (copy, both) = ("copy_bias_rows", ["hopper_bwd_prepare", "hopper_bwd"]);
    let stored = [copy, both[0], both[1], copy];
    assert_eq!(kernels(17, 7, DType::BF16), stored);
    assert_eq!(kernels(16, 7, DType::BF16), both);
    assert_eq!(kernels(17, 7, DType::F32), [""; 0]);
    let summed = [copy, both[0], both[1], "hopper_bwd_dbias"];
    for dtype in [DType::BF16, DType::F32] {
        assert_eq!(kernels(20, 1, dtype), summed);
        assert_eq!(kernels(24, 1, dtype), summed[1..]);
    }
    // Where the portable kernels are faster than two copies.
    for (head_dim, window_right) in [(64, -1), (128, 0)] {
        assert_eq!(kernels_of(head_dim, window_right, 17, 7, DType::BF16), [""; 0]);
        assert_eq!(kernels_of(head_dim, window_right, 16, 7, DType::BF16), both);
        assert_eq!(kernels_of(head_dim, window_right, 17, 1, DType::BF16)[0], copy);
    }
    // Of f32 only one whose 1000 query rows of four heads share each row at least 4 times, under a mask 8 times, is copied.
    for head_dim in [64, 96, 128] {
        let wide = |keys, seqs, dtype| kernels_with_rows(DType::F32, head_dim, -1, [9, keys], seqs, dtype);
        assert_eq!(wide(20, 7, DType::F32), both);
        assert_eq!(wide(20, 7, DType::BF16), [""; 0]);
        assert_eq!(wide(18, 7, DType::F32), [""; 0]);
        assert_eq!(wide(18, 1, DType::F32), summed);
        assert_eq!(wide(20, 1, DType::F32), summed[1..]);
        for (window_right, rows) in [(-1, 250), (0, 125)] {
            let of_rows = |rows| kernels_with_rows(DType::F32, head_dim, window_right, [rows, 18], 1, DType::F32);
            assert_eq!(of_rows(rows), summed);
            assert_eq!(of_rows(rows + 1), [""; 0]);
        }
    }
}

#[test]
fn a_gradient_of_a_bias_at_no_multiple_of_16_bytes_is_refused() {
    let mut problem = gradients(64);
    problem.dbias = Some(Tensor::dense(DType::BF16, std::ptr::without_provenance_mut(0x1008), &[]));
    let refusal = super::super::launches(&problem).err().expect("the gradient is misaligned");
    assert!(refusal.message.ends_with("expected multiples of 16 bytes for both"), "{}", refusal.message);
}

/// On 132 SMs: four tiles of 192 items, 16 of 49, four of 196, and 121. Heads are four.
#[test]
fn few_tiles_of_a_shared_bias_have_clusters_or_are_left_to_the_portable_kernels() {
    let cluster_of = |heads, seqs, len| {
        let mut problem = gradients(64);
        let bias = Some(Bias { data: null(), dtype: DType::BF16, seqs: 1, heads, rows: len, keys: len });
        let forward = problem.forward;
        problem.forward = Attention { max_seqs: seqs, score: Score { bias, ..forward.score }, ..forward };
        problem.dbias = Some(Tensor::dense(DType::BF16, null_mut(), &[]));
        let device = Device { sms: 132, ..device(true) };
        let launches = HopperBackward::of(&problem, &device)?.launches(&problem, device).expect("there are kernels");
        let dbias = launches.last().expect("there is one for dbias");
        assert_eq!((dbias.kernel, dbias.config.grid[1]), ("hopper_bwd_dbias", dbias.attributes.cluster));
        Some(dbias.attributes.cluster)
    };
    assert_eq!(cluster_of(1, 48, 200), Some(6));
    assert_eq!(cluster_of(4, 49, 200), Some(6));
    assert_eq!(cluster_of(1, 49, 200), None);
    assert_eq!(cluster_of(1, 49, 1400), Some(1));
}

#[test]
fn short_sequences_of_large_groups_are_left_to_the_portable_kernels() {
    let takes = |seqs, heads| {
        let mut problem = gradients(128);
        problem.workspace = Some(Tensor::dense(DType::U8, null_mut(), &[90_000_000]));
        problem.forward = Attention { max_seqs: seqs, num_q_heads: heads, ..problem.forward };
        HopperBackward::of(&problem, &Device { sms: 92, ..device(true) }).is_some()
    };
    // Two KV heads. Up to 46 sequences have an SM per KV head.
    assert!(takes(46, 8) && !takes(47, 8) && takes(500, 6));
}

#[test]
fn query_heads_are_split() {
    const LARGE: &[i64; 1] = &[1 << 32];
    let splits_of = |heads: [usize; 2], [seqs, length]: [usize; 2], window_right, workspace: &'static [i64; 1]| {
        let mut problem = gradients(128);
        problem.num_keys = seqs * length;
        let forward = problem.forward;
        let score = Score { window_right, ..forward.score };
        let [num_q_heads, num_kv_heads] = heads;
        problem.forward =
            Attention { num_rows: seqs * length, max_seqs: seqs, num_q_heads, num_kv_heads, score, ..forward };
        problem.workspace = Some(Tensor::dense(DType::U8, null_mut(), workspace));
        let device = Device { sms: 132, ..device(true) };
        let config = HopperBackward::of(&problem, &device).expect("the kernels take the call");
        let layout = config.layout;
        let kernels = config.launches(&problem, device).expect("there are kernels").len();
        assert_eq!(kernels, 2 + usize::from(layout.splits_heads()));
        layout.head_splits
    };
    for (heads, expected) in [
        ([16, 1], 16),
        ([8, 1], 8),
        ([28, 1], 14),
        ([12, 1], 12),
        ([24, 2], 12),
        ([40, 8], 3),
        ([32, 4], 8),
        ([7, 1], 7),
        ([2, 2], 1),
        ([64, 8], 4),
        ([28, 4], 7),
    ] {
        assert_eq!(splits_of(heads, [1, 1000], 0, LARGE), expected, "{heads:?}");
    }
    // With less memory than the parts take.
    assert_eq!(splits_of([16, 1], [1, 1000], 0, &[11_000_000]), 2);
    assert_eq!(splits_of([16, 1], [1, 1000], 0, &[9_000_000]), 1);
    // Tiles with hardly any steps, of which there would be more than SMs.
    assert_eq!(splits_of([8, 1], [17, 127], 0, LARGE), 4);
    // With enough tiles, parts of short sequences fill the SMs a few times, and those of longer ones have up to four heads.
    let splits_of_16k_tokens = |seqs| {
        let calls = [[16, 1], [32, 1], [64, 1], [16, 4], [32, 4]];
        calls.map(|heads| splits_of(heads, [seqs, 16384 / seqs], 0, LARGE))
    };
    assert_eq!(splits_of_16k_tokens(4), [8, 8, 16, 2, 2]);
    assert_eq!(splits_of_16k_tokens(16), [4, 4, 4, 1, 1]);
    // Causal: heads of 768 columns and more are split for long sequences, others only if they have few tiles.
    let causal = [
        ([28, 4], [1, 5000], 4),
        ([28, 4], [4, 4096], 2),
        ([64, 8], [1, 9430], 2),
        ([64, 8], [4, 2048], 1),
        ([48, 8], [2, 6100], 2),
        ([128, 8], [1, 9430], 4),
        ([32, 8], [1, 1700], 2),
        ([32, 8], [1, 9430], 1),
    ];
    // Without a mask they are split if this fills the last wave of tiles, unless the sequences are short.
    let full = [
        ([28, 4], [1, 5000], 4),
        ([28, 4], [1, 12000], 1),
        ([64, 8], [1, 9430], 2),
        ([64, 8], [1, 12000], 1),
        ([128, 8], [16, 1000], 1),
        ([128, 8], [1, 16000], 4),
    ];
    for (window_right, cases) in [(0, &causal[..]), (-1, &full)] {
        for &(heads, batch, expected) in cases {
            let splits = splits_of(heads, batch, window_right, LARGE);
            assert_eq!(splits, expected, "{heads:?} heads, {batch:?} tokens, window_right {window_right}");
        }
    }
    // 128 tiles of one length fill the 132 SMs, 32 or 150 do not.
    let equal_tiles = [32, 128, 150].map(|tiles| splits_of([16, 1], [1, tiles * KEYS as usize], -1, LARGE));
    assert_eq!(equal_tiles, [8, 1, 8]);
}

#[test]
fn what_the_front_ends_allocate_is_enough() {
    let narrow = HOPPER_BWD.iter().filter(|tile| ["none", "bias_f32"].contains(&tile.logits));
    // Past 128 columns there is no dq_accum.
    let wide = [(192, 128, 0), (256, 128, 0)];
    for (dim, queries, columns) in narrow.map(|tile| (tile.head_dim, tile.queries, tile.head_dim)).chain(wide) {
        let is_narrow = columns > 0;
        let tile_keys = if is_narrow { 128 } else { 64 };
        // The call has one KV head, and as many keys as queries.
        let partial_gradients = |keys: usize, heads: usize| {
            let tiles = keys.div_ceil(tile_keys) as i64;
            let splits = max_head_splits(heads as i64, 1, i64::from(dim), tiles) as usize;
            let column_bytes = if splits == 1 { 0 } else { 4 * splits * keys };
            let dims = [dim as usize, dim as usize - 8];
            let [dk_bytes, dv_bytes] = dims.map(|columns| columns * column_bytes);
            PartialGradients { head_splits: splits, dk_bytes, dv_bytes }
        };
        for (rows, seqs, heads) in [(1, 1, 1), (17, 5, 3), (4096, 1, 16), (16384, 4, 16), (100, 4000, 2), (77, 0, 8)] {
            for dtype in [DType::F16, DType::BF16] {
                let dim = i64::from(dim);
                let sizes = AttentionSizes {
                    num_q_heads: heads as i64,
                    num_kv_heads: 1,
                    head_dim: dim,
                    value_dim: dim - 8,
                    dtype,
                    batch_invariant: false,
                };
                let wanted = sizes.gradients_workspace();
                let allocated = wanted.fixed + wanted.per_row * rows as i64 + wanted.per_sequence * seqs as i64;
                for start in [0x1000, 0x1001, 0x107f] {
                    let partial = partial_gradients(rows, heads);
                    let counts = [rows, seqs, heads];
                    let place =
                        |options| WorkspaceLayout::new(start as *mut u8, queries, columns, counts, partial, options);
                    let layout = place(LayoutOptions::default());
                    let with_bias = LayoutOptions { bias_bytes: Some(0), ..LayoutOptions::default() };
                    let copies = [(dtype, false), (DType::F32, true)].map(|(dtype, is_shared)| {
                        let copied = Bias { data: null(), dtype, seqs, heads, rows, keys: 1001 };
                        let bytes = Some(PaddedBias::copied_bytes(&copied, dtype));
                        let (keys, is_masked, has_gradient) = (1001, true, false);
                        let bias_rows = (seqs * heads * rows) as i64;
                        let sizes_of_bias = BiasSizes {
                            keys,
                            dtype,
                            is_shared,
                            is_masked,
                            has_gradient,
                            rows: 8 * bias_rows,
                            bias_rows,
                        };
                        // And 256 bytes of what is fixed, beside dS.
                        let per_bias_row = sizes.bias_workspace(Op::FlashAttnVarlenBwd, sizes_of_bias).per_bias_row;
                        let copy_bytes = 256 + per_bias_row * (seqs * heads * rows) as i64;
                        (LayoutOptions { bias_bytes: bytes, ..LayoutOptions::default() }, copy_bytes)
                    });
                    let with_ranges = |keys| LayoutOptions { range_keys: Some(keys), ..LayoutOptions::default() };
                    if is_narrow {
                        assert!(place(with_bias).bytes as i64 <= allocated, "{rows} rows, {seqs} sequences");
                        for (with_copied_bias, copy_bytes) in copies {
                            assert!(place(with_copied_bias).bytes as i64 <= allocated + copy_bytes);
                        }
                        assert!(place(with_ranges(rows)).bytes as i64 <= allocated, "{rows} rows, {seqs} sequences");
                        assert!(place(with_ranges(20 * rows)).bytes as i64 <= allocated);
                    }
                    assert!(layout.bytes as i64 <= allocated, "{rows} rows, {seqs} sequences, {heads} heads");
                    // Beside dK and dV of parts, of few tiles or of as many keys as queries, at most 2 % of the allocation is unused.
                    let partial_bytes = (partial.dk_bytes + partial.dv_bytes) as i64;
                    let splits = match head_splits(heads as i64, 1, dim) {
                        1 => 0,
                        splits => splits,
                    };
                    let few_tile_keys = if heads > 1 { FEW_HEAD_SPLIT_TILES * tile_keys as i64 } else { 0 };
                    let most_partial_bytes = 4 * (2 * dim - 8) * (splits * rows as i64 + few_tile_keys);
                    let used = layout.bytes as i64 - partial_bytes;
                    assert!(allocated - most_partial_bytes <= used * 51 / 50 + 10_000 * heads as i64);
                }
            }
        }
    }
}
