//! Random calls of the other operators: cache updates, rotations, gathers, merges, additions.

use crate::fuzz_call::FuzzCall;
use crate::generator::Generator;
use crate::support::{
    ANY_LSE, ATTENTION_DTYPES, Array, BF16, CacheUpdateCase, F8E4M3FN, F8E5M2, F16, F32, F64, FP8_DTYPES, GatherCase,
    I8, I32, I64, KvLayout, RopeCase, SCALED_DTYPES, State, U8, addition, any_bits, assert_same, dims_of, sum,
};

fn update(generator: &mut Generator, layouts: &[KvLayout], may_be_scaled: bool) -> CacheUpdateCase {
    let layout = generator.one_of(layouts);
    let dtype = generator.one_of(&ATTENTION_DTYPES);
    let (heads, head_dim) = (generator.between(1, 4), generator.head_dim());
    let (tokens, num_pages) = (generator.between(0, 14), generator.between(0, 5));
    let page_size = generator.one_of(&[0, 1, 2, 3, 4, 8, 16, 17]);
    let wide_slots = generator.chance(50);
    // The rows of a cache with scales need one buffer and an operator that takes them.
    let scaled = may_be_scaled && layout != KvLayout::Split && generator.chance(30);
    let unscaled = generator.one_of(&[None, None, Some(F8E4M3FN), Some(F8E5M2)]);
    CacheUpdateCase {
        layout,
        dtype,
        fp8: if scaled { Some(generator.one_of(&SCALED_DTYPES)) } else { unscaled },
        scaled,
        num_pages: if head_dim > 128 { num_pages.min(2) } else { num_pages },
        page_size,
        heads,
        dims: [head_dim, if layout == KvLayout::Split { generator.head_dim() } else { head_dim }],
        slots: generator.slots(tokens, num_pages * page_size, wide_slots),
        wide_slots,
        scales: if scaled { [None, None] } else { [generator.scale(heads), generator.scale(heads)] },
        seed: generator.random.next() >> 1,
    }
}

/// Calls of `kv_cache_update` and `kv_cache_update_split`.
pub(crate) fn cache_update(generator: &mut Generator) -> FuzzCall {
    let update = update(
        generator,
        &[KvLayout::Split, KvLayout::Split, KvLayout::Interleaved, KvLayout::Stacked, KvLayout::PerPage],
        true,
    );
    let call = update.invocation(generator.chance(60));
    FuzzCall::new(call, move |results| {
        for (results, expected) in results.iter().zip(update.expected()) {
            assert_same("the cache", results, &expected);
        }
    })
}

/// Calls of `rope_kv_cache_update`.
pub(crate) fn rope(generator: &mut Generator) -> FuzzCall {
    let update = update(generator, &[KvLayout::Interleaved, KvLayout::Stacked, KvLayout::PerPage], false);
    let max_pos = generator.between(0, 20);
    let rope = RopeCase {
        q_heads: generator.between(1, 8),
        rotated: 2 * generator.between(0, update.dims[0] / 2),
        max_pos,
        positions: generator.lengths(update.slots.len(), max_pos.saturating_sub(1)),
        interleaved: generator.chance(50),
        update,
    };
    let mut call = rope.invocation(generator.chance(60));
    let mut query = rope.query();
    let row = rope.q_heads * rope.update.dims[0] * query.dtype.size();
    // Some tokens have queries with special values, whose rotations are not compared.
    let special_values: Vec<bool> =
        (0..rope.positions.len()).map(|_| generator.special_values && generator.chance(30)).collect();
    for token in (0..special_values.len()).filter(|&token| special_values[token]) {
        let bytes = token * row..(token + 1) * row;
        let elements = vec![(row / query.dtype.size()) as i64];
        let mut rows = Array { dtype: query.dtype, dims: elements, bytes: query.bytes[bytes.clone()].to_vec() };
        generator.insert_special_values(&mut rows);
        query.bytes[bytes].copy_from_slice(&rows.bytes);
    }
    call = call.with_operand("query", query);
    FuzzCall::new(call, move |results| {
        let [cache, query_out] = rope.expected();
        assert_same("the cache", &results[0], &cache);
        let mut queries = results[1].clone();
        for token in (0..special_values.len()).filter(|&token| special_values[token]) {
            let bytes = token * row..(token + 1) * row;
            queries.bytes[bytes.clone()].copy_from_slice(&query_out.bytes[bytes]);
        }
        assert_same("the queries", &queries, &query_out);
    })
}

/// Calls of `gather_kv_cache`.
pub(crate) fn gather(generator: &mut Generator) -> FuzzCall {
    let layout = generator.one_of(&KvLayout::PAGED);
    let scaled = layout != KvLayout::Split && generator.chance(30);
    let unscaled = generator.one_of(&[F16, BF16, F32, F8E4M3FN, F8E5M2]);
    let dtype = if scaled { generator.one_of(&SCALED_DTYPES) } else { unscaled };
    let wider = generator.one_of(&ATTENTION_DTYPES);
    let out = if scaled {
        wider
    } else if FP8_DTYPES.contains(&dtype) {
        generator.one_of(&[dtype, wider])
    } else {
        dtype
    };
    let (heads, head_dim) = (generator.between(1, 4), generator.head_dim());
    let (num_pages, max_pages, seqs) = (generator.between(0, 4), generator.between(0, 4), generator.between(0, 6));
    let page_size = generator.one_of(&[1, 2, 3, 4, 8, 16, 17]);
    let has_scale = !scaled && !FP8_DTYPES.contains(&out);
    let scale = |generator: &mut Generator| if has_scale { generator.scale(heads) } else { None };
    let gather = GatherCase {
        layout,
        dtype,
        out,
        num_pages,
        page_size,
        heads,
        dims: [head_dim, if layout.has_two_buffers() { generator.head_dim() } else { head_dim }],
        max_pages,
        tables: generator.lengths(seqs * max_pages, num_pages.saturating_sub(1)),
        lens: generator.lengths(seqs, max_pages * page_size),
        capacity: generator.between(0, 60),
        scales: [scale(generator), scale(generator)],
        scaled,
        seed: generator.random.next() >> 1,
    };
    FuzzCall::new(gather.invocation(), move |results| gather.assert_results(results))
}

/// Calls of `merge_attention_states`.
pub(crate) fn merge(generator: &mut Generator) -> FuzzCall {
    let dtype = generator.one_of(&ATTENTION_DTYPES);
    let sizes = (generator.between(0, 20), generator.between(0, 6), generator.one_of(&[1, 2, 3, 7, 8, 64, 300]));
    let mut state = || State::random(dtype, sizes, &ANY_LSE, generator.random.next());
    let (a, b) = (state(), state());
    FuzzCall::new(a.merge(&b), move |results| State::of(results).assert_merged_from(&a, &b))
}

/// Calls of `simple_add`.
pub(crate) fn add(generator: &mut Generator) -> FuzzCall {
    let dtype = generator.one_of(&[F16, BF16, F32, F64, I8, U8, I32, I64]);
    let dims: Vec<usize> = (0..generator.between(0, 5)).map(|_| generator.between(0, 6)).collect();
    let mut operand = || any_bits(dtype, &dims_of(&dims), generator.random.next());
    let (a, b) = (operand(), operand());
    FuzzCall::new(addition(a.clone(), b.clone()), move |results| assert_same("out", &results[0], &sum(&a, &b)))
}
