//! Random calls of the attention operators, forward and backward.

use crate::fuzz_call::FuzzCall;
use crate::generator::Generator;
use crate::support::{
    Alibi, Array, AttentionCase, AttentionConfig, BF16, ClampedSequence, Dtypes, ErrorBound, F8E4M3FN, F16, F32,
    GradientCase, GradientOptions, I8, InvalidMetadata, Invocation, KvGeometry, KvLayout, LARGEST, Mask, Numbers,
    TreeMask, assert_gradients, assert_within, clamped_sequences, count, dequantized, expected_gradients,
    expected_rows_of, runs_on_cpu,
};
use xla_attention::Op;

/// Limits of the size of a call: multiplications in the reference, elements of an operand, rows, keys.
struct Limits {
    work: usize,
    elements: usize,
    rows: usize,
    keys: usize,
}

impl Limits {
    fn generate(generator: &mut Generator) -> Self {
        match generator.random.below(1000) {
            0..=749 => Self { work: 12_000, elements: 4_000, rows: 9, keys: 24 },
            750..=984 => Self { work: 100_000, elements: 20_000, rows: 40, keys: 90 },
            985..=998 => Self { work: 2_000_000, elements: 200_000, rows: 300, keys: 900 },
            _ => Self { work: 10_000_000, elements: 2_000_000, rows: 700, keys: 9000 },
        }
    }
}

/// Sizes and options of a call.
pub(crate) struct ProblemSizes {
    pub(crate) config: AttentionConfig,
    alibi: Alibi,
    pub(crate) rows: usize,
    slots: usize,
    /// Rows of contiguous keys, or keys that a block table row may address.
    keys: usize,
    elements: usize,
}

impl ProblemSizes {
    pub(crate) fn generate(generator: &mut Generator, dtypes: Dtypes, mask: Mask, own_value_dim: bool) -> Self {
        let limits = Limits::generate(generator);
        let kv_heads = generator.between(1, 3);
        let q_heads = kv_heads * generator.one_of(&[1, 1, 2, 3, 4, 5, 8, 17]);
        let head_dim = generator.head_dim();
        let value_dim = if own_value_dim && generator.chance(40) { generator.head_dim() } else { head_dim };
        // Few rows over many keys, many rows, or neither.
        let rows = if generator.chance(40) { generator.between(0, 4) } else { generator.between(0, limits.rows) };
        let mut rows = rows.min(limits.elements / (q_heads * head_dim.max(value_dim)));
        let mut keys = generator.between(0, limits.keys).min(limits.elements / (kv_heads * (head_dim + value_dim)));
        while rows * keys * q_heads * (head_dim + value_dim) > limits.work {
            *(if keys > 2 * rows { &mut keys } else { &mut rows }) /= 2;
        }
        let slots = generator.between(0, 7);
        let alibi = generator.one_of(&[Alibi::Off, Alibi::Off, Alibi::Off, Alibi::PerHead, Alibi::PerSequence]);
        let sinks = generator.f32s(q_heads, |random| 1.0 + 2.0 * random.normal());
        let usual_scale = (head_dim as f32).sqrt().recip();
        let config = AttentionConfig {
            dtypes,
            q_heads,
            kv_heads,
            head_dim,
            value_dim,
            softmax_scale: generator.one_of(&[usual_scale, usual_scale, 0.03, if head_dim > 32 { 0.2 } else { 1.0 }]),
            mask,
            softcap: generator.one_of(&[0.0, 0.0, 0.0, 5.0]),
            sinks: generator.chance(25).then_some(sinks),
            q_scale: None,
            k_scale: None,
            v_scale: None,
            batch_invariant: generator.chance(30),
        };
        Self { config, alibi, rows, slots, keys, elements: limits.elements }
    }

    fn slopes(&self, generator: &mut Generator) -> Option<Vec<f32>> {
        let count = self.config.q_heads * if self.alibi == Alibi::PerSequence { self.slots } else { 1 };
        let slopes =
            generator.f32s(count, |random| random.one_of(&[0.5, 0.25, 0.0625, 0.0039, 0.7, 1.0, 0.0, -0.0039]));
        (self.alibi != Alibi::Off).then_some(slopes)
    }

    fn queries(&self, generator: &mut Generator) -> Array {
        generator.numbers(self.config.dtypes.q, &[self.rows, self.config.q_heads, self.config.head_dim])
    }
}

/// Keys and values, and their block tables.
pub(crate) struct StoredKeys {
    kv_geometry: KvGeometry,
    kv: Vec<Array>,
    /// The scales of the rows, if each has one.
    scale_cache: Option<Array>,
    max_pages: usize,
    block_table: Vec<i32>,
}

impl StoredKeys {
    pub(crate) fn generate(generator: &mut Generator, sizes: &ProblemSizes, layout: KvLayout) -> Self {
        let config = &sizes.config;
        let mut kv_geometry = KvGeometry {
            layout,
            num_pages: sizes.keys,
            page_size: 1,
            kv_heads: config.kv_heads,
            dims: [config.head_dim, config.value_dim],
        };
        let (mut max_pages, mut block_table) = (0, Vec::new());
        if layout != KvLayout::Contiguous {
            kv_geometry.page_size = generator.one_of(&[1, 2, 3, 4, 8, 16, 16, 17, 32, 64]).min((2 * sizes.keys).max(1));
            let row = config.kv_heads * (config.head_dim + config.value_dim);
            let max_num_pages = (sizes.elements / (row * kv_geometry.page_size))
                .min(2 * sizes.keys.div_ceil(kv_geometry.page_size) + 2);
            kv_geometry.num_pages = generator.between(0, max_num_pages);
            max_pages = generator.between(0, sizes.keys.div_ceil(kv_geometry.page_size));
            block_table = generator.pages(sizes.slots * max_pages, kv_geometry.num_pages);
        }
        let dims = |shape: &Vec<i64>| -> Vec<usize> { shape.iter().map(|&d| d as usize).collect() };
        let kv = kv_geometry.shapes().iter().map(|shape| generator.numbers(config.dtypes.kv, &dims(shape))).collect();
        let scale_cache = config.dtypes.scaled.then(|| {
            let (dims, unit) = (kv_geometry.scale_dims(), if config.dtypes.kv == I8 { 1.0 / 40.0 } else { 1.0 });
            let scales = generator.f32s(count(&dims), |random| unit * (0.25 + 1.75 * random.unit()));
            Array::new(F32, &dims, &scales.into_iter().map(f64::from).collect::<Vec<_>>())
        });
        Self { kv_geometry, kv, scale_cache, max_pages, block_table }
    }

    /// The numbers that the cache stands for, without `k_scale` and `v_scale`.
    fn values(&self) -> Vec<Vec<f64>> {
        match &self.scale_cache {
            Some(scales) => vec![dequantized(&self.kv[0], scales)],
            None => self.kv.iter().map(Array::values).collect(),
        }
    }

    /// The largest number of keys of a sequence.
    fn capacity(&self) -> usize {
        match self.kv_geometry.layout {
            KvLayout::Contiguous => self.kv_geometry.num_pages,
            _ if self.kv_geometry.num_pages == 0 => 0,
            _ => self.max_pages * self.kv_geometry.page_size,
        }
    }
}

fn any_mask(generator: &mut Generator) -> Mask {
    Mask {
        causal: generator.chance(50),
        window_left: generator.one_of(&[-1, -1, 0, 1, 5, 1 << 62, i64::MAX]),
        window_right: generator.one_of(&[-1, -1, 0, 3, i64::MAX]),
        top_left: generator.chance(30),
        ..Mask::FULL
    }
}

/// A bias of any size, where the call may have one.
fn bias(
    generator: &mut Generator,
    target: Op,
    sizes: &ProblemSizes,
    layout: KvLayout,
    has_bounds: bool,
) -> Option<Array> {
    let AttentionConfig { dtypes, q_heads, .. } = sizes.config;
    let suits = target == Op::FlashAttnVarlen && layout == KvLayout::Contiguous && !has_bounds;
    if !suits || dtypes.q == F8E4M3FN || dtypes.q != dtypes.kv || !generator.chance(30) {
        return None;
    }
    let dtype = generator.one_of(&[dtypes.q, F32]);
    let (seqs, heads) = (generator.one_of(&[1, sizes.slots]), generator.one_of(&[1, q_heads]));
    let largest = (sizes.elements / (seqs * heads).max(1)).isqrt().max(1);
    let rows = generator.between(0, largest.min(sizes.rows + 2));
    let keys = generator.between(0, largest.min(sizes.keys + 2));
    Some(generator.numbers(dtype, &[seqs, heads, rows, keys]))
}

/// A call with random metadata. Options that `target` lacks are off.
pub(crate) fn case(generator: &mut Generator, target: Op, sizes: &ProblemSizes, stored: StoredKeys) -> AttentionCase {
    let paged = target != Op::FlashAttnVarlen;
    let (slots, capacity) = (sizes.slots, stored.capacity());
    let q = sizes.queries(generator);
    let cu_seqlens_q = generator.starts(slots + 1, sizes.rows);
    let lengths = |generator: &mut Generator, percent: usize, limit: usize| {
        let lengths = generator.lengths(slots, limit);
        generator.chance(percent).then_some(lengths)
    };
    let seqused_k = lengths(generator, if paged { 100 } else { 50 }, capacity);
    let seqused_q = lengths(generator, if paged { 0 } else { 30 }, sizes.rows);
    let leftpad_k = lengths(generator, if paged { 0 } else { 30 }, capacity);
    // With ALiBi, scores of distances that are far apart are too large for f32 to tell keys apart.
    let far = if sizes.alibi == Alibi::Off { [1 << 28, i32::MAX, i32::MIN] } else { [77, 99, -77] };
    let q_offset = (!paged && !sizes.config.mask.top_left && generator.chance(30))
        .then(|| (0..slots).map(|_| generator.one_of(&[0, 1, -1, 5, -9, 40, far[0], far[1], far[2]])).collect());
    // GPUs have no kernel for both masks of rows and scales of rows.
    let may_have_row_masks = target != Op::MlaPagedAttention && (stored.scale_cache.is_none() || runs_on_cpu());
    let bounds = |generator: &mut Generator| {
        let bounds = generator.lengths(sizes.rows, capacity);
        generator.chance(if may_have_row_masks { 30 } else { 0 }).then_some(bounds)
    };
    let (k_start, k_end) = (bounds(generator), bounds(generator));
    let tree_mask = (target == Op::PagedAttention && may_have_row_masks && generator.chance(40)).then(|| {
        let q_max = generator.one_of(&[0, 1, 3, 8, 32, 40]);
        let count = slots * q_max * TreeMask::query_words(q_max);
        TreeMask { q_max, words: generator.lengths(count, 1 << 20) }
    });
    let bias = bias(generator, target, sizes, stored.kv_geometry.layout, k_start.is_some() || k_end.is_some());
    let is_read = stored.kv_geometry.layout == KvLayout::Contiguous || seqused_k.is_none();
    // Without sequences an empty `seqused_k` counts as left out, and `cu_seqlens_k` must have its size.
    let starts = if is_read || slots == 0 { slots + 1 } else { generator.between(0, slots + 3) };
    let cu_seqlens_k = if starts == 0 { Vec::new() } else { generator.starts(starts, capacity) };
    let num_seqs = if generator.chance(50) { slots as i32 } else { generator.lengths(1, slots)[0] };
    AttentionCase {
        name: String::new(),
        target,
        config: sizes.config.clone(),
        kv_geometry: stored.kv_geometry,
        max_pages: stored.max_pages,
        q_values: q.values(),
        kv_values: stored.values(),
        scale_cache: stored.scale_cache,
        q,
        kv: stored.kv,
        cu_seqlens_q,
        num_seqs,
        seqused_q,
        cu_seqlens_k,
        seqused_k,
        leftpad_k,
        q_offset,
        k_start,
        k_end,
        tree_mask,
        block_table: stored.block_table,
        bias_values: bias.as_ref().map_or_else(Vec::new, Array::values),
        bias,
        alibi_slopes: sizes.slopes(generator),
        alibi: sizes.alibi,
        hints: (generator.one_of(&[0, 0, 1, 1 << 62]), generator.one_of(&[0, 0, 1, 1 << 62])),
        lse: !paged || generator.chance(50),
        workspace: {
            let bytes = generator.one_of(&[0, 40, 1000, 100_000]);
            generator.chance(30).then_some(bytes)
        },
    }
}

/// Dtypes of `paged_attention`, which takes caches with a scale per row.
pub(crate) fn paged_dtypes(generator: &mut Generator) -> Dtypes {
    if generator.chance(25) { generator.one_of(&Dtypes::SCALED) } else { generator.one_of(&Dtypes::ALL) }
}

/// Scales of tensors and heads, which a cache with a scale per row does not take.
pub(crate) fn with_scales(generator: &mut Generator, mut sizes: ProblemSizes) -> ProblemSizes {
    if sizes.config.dtypes.scaled {
        return sizes;
    }
    let heads = sizes.config.kv_heads;
    (sizes.config.q_scale, sizes.config.k_scale) = (generator.scale(heads), generator.scale(heads));
    sizes.config.v_scale = generator.scale(heads);
    sizes
}

/// The allowed error in addition to that of the naive formula, relative to the largest output. In a call with one or
/// two rows the naive formula may happen to be exact, so this allows two roundings of the computation's dtype, for the
/// softmax weights and the output, a third one where a weight is multiplied by the scale of its row, and one rounding to
/// fp8 where the weights may be fp8.
fn floor(dtypes: Dtypes) -> f64 {
    let of_fp8 = if dtypes.q == F8E4M3FN && !runs_on_cpu() { 2f64.powi(-4) } else { 0.0 };
    let roundings = if dtypes.scaled { 3.0 } else { 2.0 };
    3e-5 + roundings * dtypes.rounding() + of_fp8
}

/// Asserts that every row of `out` and `softmax_lse` is written: with +0 and -inf for rows of no sequence, and with the
/// reference's result where `is_specified`.
pub(crate) fn assert_forward_results(
    case: &AttentionCase,
    is_specified: impl Fn(&ClampedSequence) -> bool,
    out: &Array,
    lse: Option<&Array>,
) {
    let sequences = clamped_sequences(case);
    let expected_rows = expected_rows_of(case, &sequences, is_specified);
    let error_bound = ErrorBound::of(expected_rows.iter().flatten().flatten(), floor(case.config.dtypes));
    assert_within(case, &expected_rows, error_bound, out, lse);
    let row = out.bytes.len() / case.rows().max(1);
    for padding in (0..case.rows()).filter(|row| !sequences.iter().any(|m| m.rows().contains(row))) {
        let zero = out.bytes[padding * row..(padding + 1) * row].iter().all(|&b| b == 0);
        assert!(zero, "{}: row {padding} is of no sequence and not +0", case.name);
    }
}

/// Sizes and options of calls over a latent cache, whose values are the first columns of the keys.
pub(crate) fn latent_sizes(generator: &mut Generator) -> ProblemSizes {
    let (mask, dtypes) = (Mask { top_left: false, ..any_mask(generator) }, generator.one_of(&Dtypes::LATENT));
    let mut sizes = ProblemSizes::generate(generator, dtypes, mask, true);
    let scale = generator.scale(1);
    let config = &mut sizes.config;
    config.kv_heads = 1;
    config.value_dim = config.value_dim.min(config.head_dim);
    (config.k_scale, config.v_scale) = (scale.clone(), scale);
    ProblemSizes { alibi: Alibi::Off, ..sizes }
}

/// Calls of `flash_attn_varlen`, `paged_attention` and `mla_paged_attention`.
pub(crate) fn forward(generator: &mut Generator, target: Op) -> FuzzCall {
    let (sizes, layout) = if target == Op::MlaPagedAttention {
        (latent_sizes(generator), KvLayout::Latent)
    } else {
        let (mask, layout) = if target == Op::PagedAttention {
            (sliding(generator), KvLayout::Interleaved)
        } else {
            let layout = if generator.chance(40) { KvLayout::Contiguous } else { generator.one_of(&KvLayout::PAGED) };
            (any_mask(generator), layout)
        };
        let dtypes =
            if target == Op::PagedAttention { paged_dtypes(generator) } else { generator.one_of(&Dtypes::ALL) };
        let sizes = ProblemSizes::generate(generator, dtypes, mask, layout.has_two_buffers());
        (with_scales(generator, sizes), layout)
    };
    let stored = StoredKeys::generate(generator, &sizes, layout);
    let case = case(generator, target, &sizes, stored);
    let call = case.invocation();
    let second =
        (generator.special_values && generator.chance(25)).then(|| with_other_special_values(generator, &case));
    let fuzz_call = FuzzCall::new(call, {
        let case = case.clone();
        move |results| {
            let is_compared = |m: &ClampedSequence| m.is_specified(InvalidMetadata::Clamped);
            assert_forward_results(&case, is_compared, &results[0], case.lse.then(|| &results[1]));
        }
    });
    match second {
        Some(call) => fuzz_call.with_second_call(call, move |first, second| assert_isolated(&case, first, second)),
        None => fuzz_call,
    }
}

pub(crate) fn sliding(generator: &mut Generator) -> Mask {
    // `sliding_window` counts the query's own key, so that a window of 2^62 keys has a `window_left` of one less.
    Mask { window_left: generator.one_of(&[-1, -1, 0, 1, 6, (1 << 62) - 1]), ..Mask::CAUSAL }
}

/// The same call with other special values in place of those that are not finite.
fn with_other_special_values(generator: &mut Generator, case: &AttentionCase) -> Invocation {
    let mut changed = case.clone();
    let mut replace_special_values = |array: &mut Array| {
        let (dtype, size) = (array.dtype, array.dtype.size());
        let nan = dtype.encode(f64::NAN);
        let sign = generator.random.below(2) as u8 * 0x80;
        for element in array.bytes.chunks_exact_mut(size) {
            let value = dtype.decode(element);
            if value.is_nan() || value.abs() > LARGEST {
                // NaN replaces infinities, and infinity (or the largest number of a dtype without it) replaces NaN.
                let new = if value.is_nan() { dtype.encode(f64::INFINITY) } else { nan.clone() };
                element.copy_from_slice(&new);
                element[size - 1] |= sign;
            }
        }
    };
    replace_special_values(&mut changed.q);
    changed.kv.iter_mut().for_each(replace_special_values);
    changed.invocation()
}

/// Asserts that a special value affects only its own sequence: all other rows have the bits of the second call.
fn assert_isolated(case: &AttentionCase, first: &[Array], second: &[Array]) {
    let sequences = clamped_sequences(case);
    let rows = case.rows();
    let own = |row: &usize| sequences.iter().any(|m| !m.finite && m.rows().contains(row));
    for row in (0..rows).filter(|row| !own(row)) {
        let bytes = first[0].bytes.len() / rows;
        let of = |results: &[Array]| results[0].bytes[row * bytes..(row + 1) * bytes].to_vec();
        assert!(of(first) == of(second), "row {row} depends on numbers of another sequence");
        for head in (0..case.config.q_heads).filter(|_| case.lse) {
            let of = |results: &[Array]| results[1].bytes[(head * rows + row) * 4..][..4].to_vec();
            assert!(of(first) == of(second), "the lse of row {row} depends on numbers of another sequence");
        }
    }
}

/// Calls of `flash_attn_varlen_bwd`.
pub(crate) fn backward(generator: &mut Generator) -> FuzzCall {
    let (mask, dtype) = (any_mask(generator), generator.one_of(&[F32, F32, F16, BF16]));
    let sizes = ProblemSizes::generate(generator, Dtypes::same(dtype), mask, true);
    let stored = StoredKeys::generate(generator, &sizes, KvLayout::Contiguous);
    let case = case(generator, Op::FlashAttnVarlen, &sizes, stored);
    let options = GradientOptions {
        dlse: generator.chance(30),
        dsinks: generator.chance(40),
        dbias: generator.chance(70),
        deterministic: generator.chance(50),
        dtype: generator.chance(30).then_some(F32),
    };
    let mut gradients = GradientCase::of(case, options);
    if generator.special_values && generator.chance(30) {
        generator.insert_special_values(&mut gradients.dout);
    }
    let call = gradients.invocation();
    FuzzCall::new(call, move |results| {
        let expected = expected_gradients(&gradients, InvalidMetadata::Clamped);
        // The gradient of a softmax weight is the difference of two sums of Dv rounded products, and a row may have a
        // single weight.
        let AttentionConfig { dtypes, softmax_scale, value_dim, .. } = gradients.forward.config;
        let sums = 1.0 + f64::from(softmax_scale) * (value_dim as f64).sqrt();
        let floor = (1e-4 + 2.0 * floor(dtypes)) * sums;
        assert_gradients(&gradients, &expected, results, floor);
    })
}
