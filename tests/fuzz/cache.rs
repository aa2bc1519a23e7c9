//! Calls of the operators around attention: cache updates, rotations, merges, additions.

use crate::draw::Draw;
use crate::memory::Subject;
use crate::support::{
    ANY_LSE, ATTENTION_DTYPES, Array, BF16, F8E4M3FN, F8E5M2, F16, F32, F64, FP8_DTYPES, Gather, I8, I32, I64, Layout,
    Rope, State, U8, Update, addition, any_bits, assert_same, dims_of, sum,
};

fn update(draw: &mut Draw, layouts: &[Layout]) -> Update {
    let layout = draw.one_of(layouts);
    let dtype = draw.one_of(&ATTENTION_DTYPES);
    let (heads, head_dim) = (draw.between(1, 4), draw.head_dim());
    let (tokens, num_pages) = (draw.between(0, 14), draw.between(0, 5));
    let page_size = draw.one_of(&[0, 1, 2, 3, 4, 8, 16, 17]);
    let wide_slots = draw.chance(50);
    Update {
        layout,
        dtype,
        fp8: draw.one_of(&[None, None, Some(F8E4M3FN), Some(F8E5M2)]),
        num_pages: if head_dim > 128 { num_pages.min(2) } else { num_pages },
        page_size,
        heads,
        dims: [head_dim, if layout == Layout::Split { draw.head_dim() } else { head_dim }],
        slots: draw.slots(tokens, num_pages * page_size, wide_slots),
        wide_slots,
        scales: [draw.scale(heads), draw.scale(heads)],
        seed: draw.random.next() >> 1,
    }
}

/// `kv_cache_update` and `kv_cache_update_split`.
pub(crate) fn cache_update(draw: &mut Draw) -> Subject {
    let update = update(draw, &[Layout::Split, Layout::Split, Layout::Interleaved, Layout::Stacked, Layout::PerPage]);
    let call = update.invocation(draw.chance(60));
    Subject::new(call, move |found| {
        for (found, expected) in found.iter().zip(update.expected()) {
            assert_same("the cache", found, &expected);
        }
    })
}

/// `rope_kv_cache_update`.
pub(crate) fn rope(draw: &mut Draw) -> Subject {
    let update = update(draw, &[Layout::Interleaved, Layout::Stacked, Layout::PerPage]);
    let max_pos = draw.between(0, 20);
    let rope = Rope {
        q_heads: draw.between(1, 8),
        rotated: 2 * draw.between(0, update.dims[0] / 2),
        max_pos,
        positions: draw.lengths(update.slots.len(), max_pos.saturating_sub(1)),
        interleaved: draw.chance(50),
        update,
    };
    let mut call = rope.invocation(draw.chance(60));
    let mut query = rope.query();
    let row = rope.q_heads * rope.update.dims[0] * query.dtype.size();
    // Tokens whose queries are wild may turn into anything; the others into what they always do.
    let wild: Vec<bool> = (0..rope.positions.len()).map(|_| draw.wild && draw.chance(30)).collect();
    for token in (0..wild.len()).filter(|&token| wild[token]) {
        let bytes = token * row..(token + 1) * row;
        let elements = vec![(row / query.dtype.size()) as i64];
        let mut rows = Array { dtype: query.dtype, dims: elements, bytes: query.bytes[bytes.clone()].to_vec() };
        draw.make_wild(&mut rows);
        query.bytes[bytes].copy_from_slice(&rows.bytes);
    }
    call = call.with_operand("query", query);
    Subject::new(call, move |found| {
        let [cache, query_out] = rope.expected();
        assert_same("the cache", &found[0], &cache);
        let mut queries = found[1].clone();
        for token in (0..wild.len()).filter(|&token| wild[token]) {
            let bytes = token * row..(token + 1) * row;
            queries.bytes[bytes.clone()].copy_from_slice(&query_out.bytes[bytes]);
        }
        assert_same("the queries", &queries, &query_out);
    })
}

/// `gather_kv_cache`.
pub(crate) fn gather(draw: &mut Draw) -> Subject {
    let layout = draw.one_of(&Layout::PAGED);
    let dtype = draw.one_of(&[F16, BF16, F32, F8E4M3FN, F8E5M2]);
    let out = if FP8_DTYPES.contains(&dtype) { draw.one_of(&[dtype, F16, BF16, F32]) } else { dtype };
    let (heads, head_dim) = (draw.between(1, 4), draw.head_dim());
    let (num_pages, max_pages, seqs) = (draw.between(0, 4), draw.between(0, 4), draw.between(0, 6));
    let page_size = draw.one_of(&[1, 2, 3, 4, 8, 16, 17]);
    let scale = |draw: &mut Draw| if FP8_DTYPES.contains(&out) { None } else { draw.scale(heads) };
    let gather = Gather {
        layout,
        dtype,
        out,
        num_pages,
        page_size,
        heads,
        dims: [head_dim, if layout.has_two_buffers() { draw.head_dim() } else { head_dim }],
        max_pages,
        tables: draw.lengths(seqs * max_pages, num_pages.saturating_sub(1)),
        lens: draw.lengths(seqs, max_pages * page_size),
        capacity: draw.between(0, 60),
        scales: [scale(draw), scale(draw)],
        seed: draw.random.next() >> 1,
    };
    Subject::new(gather.invocation(), move |found| gather.assert_found(found))
}

/// `merge_attention_states`.
pub(crate) fn merge(draw: &mut Draw) -> Subject {
    let dtype = draw.one_of(&ATTENTION_DTYPES);
    let sizes = (draw.between(0, 20), draw.between(0, 6), draw.one_of(&[1, 2, 3, 7, 8, 64, 300]));
    let mut state = || State::random(dtype, sizes, &ANY_LSE, draw.random.next());
    let (a, b) = (state(), state());
    Subject::new(a.merge(&b), move |found| State::of(found).assert_merged_from(&a, &b))
}

/// `simple_add`.
pub(crate) fn add(draw: &mut Draw) -> Subject {
    let dtype = draw.one_of(&[F16, BF16, F32, F64, I8, U8, I32, I64]);
    let dims: Vec<usize> = (0..draw.between(0, 5)).map(|_| draw.between(0, 6)).collect();
    let mut operand = || any_bits(dtype, &dims_of(&dims), draw.random.next());
    let (a, b) = (operand(), operand());
    Subject::new(addition(a.clone(), b.clone()), move |found| assert_same("out", &found[0], &sum(&a, &b)))
}
