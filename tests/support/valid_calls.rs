//! Valid calls of every target: those of the tables of `tests/conformance` with all operands 0, which tests of invalid calls
//! modify, and calls with random numbers in every dtype and layout.

use super::conformance::{ConformanceCase, cases, tables};
use super::{
    ANY_LSE, ATTENTION_DTYPES, Array, AttentionCase, Attr, BF16, BatchSpec, CacheUpdateCase, Dtypes, F8E4M3FN,
    GatherCase, GradientCase, GradientOptions, I64, Invocation, KvLayout, Mask, MemoryLayout, MlaUpdateCase,
    PagedUpdateCase, RopeCase, State, addition,
};

/// One call of each target.
pub fn all() -> Vec<Invocation> {
    tables().iter().flat_map(|table| table.interface.names.iter().map(|name| of(name))).collect()
}

/// The call with the required operands and all results.
pub fn of(target: &str) -> Invocation {
    let named = |name: &str| cases().find(|case: &&ConformanceCase| (case.target, case.name) == (target, name));
    let case = named("every optional result").or(named("the valid call")).unwrap();
    let mut call = Invocation { description: String::new(), ..case.invocation(false) };
    for (_, operand) in &mut call.operands {
        *operand = Array::filled(operand.dtype, &operand.dims, 0);
    }
    call
}

/// `kv_cache_update` or `rope_kv_cache_update` with another layout of the same 5 pages of 8 tokens.
pub fn in_layout(target: &str, layout: i64) -> Invocation {
    let mut call = of(target);
    let dims: &[i64] = match layout {
        2 => &[2, 5, 8, 2, 16],
        3 => &[5, 2, 8, 2, 16],
        _ => &[5, 8, 4, 16],
    };
    let cache = &mut call.operands[0].1;
    *cache = Array::filled(cache.dtype, dims, 0);
    call.results[0].dims = dims.to_vec();
    call.attribute("kv_layout", Attr::I64(layout))
}

/// Calls of every operator with random numbers and valid metadata. Caches are updated in place.
pub fn with_numbers() -> Vec<Invocation> {
    let lengths = vec![(1, 50), (20, 33)];
    let spec = |dtypes| BatchSpec { dtypes, lengths: lengths.clone(), ..BatchSpec::default() };
    let mut all = vec![
        addition(Array::f32s(&[2, 1, 2], &[1.0, 2.0, 3.0, 4.0]), Array::f32s(&[2, 1, 2], &[0.5, 0.25, 8.0, -4.0])),
        addition(Array::i64s(&[], &[i64::MAX]), Array::i64s(&[], &[1])),
        addition(Array::filled(I64, &[0, 3], 0), Array::filled(I64, &[0, 3], 0)),
    ];
    for dtypes in Dtypes::LATENT {
        let latent = MemoryLayout { page_size: 7, workspace: None, rows_around: (0, 0), ..MemoryLayout::default() };
        let spec = BatchSpec { mask: Mask::FULL, ..BatchSpec::latent(dtypes, 6, [40, 32], &lengths) };
        all.push(AttentionCase::latent(&spec.batch(), &latent).invocation());
        all.push(MlaUpdateCase::new(&spec.batch(), &latent, None).invocation(true));
    }
    for (dtypes, layout) in Dtypes::ALL.into_iter().zip(KvLayout::ALL.into_iter().cycle()) {
        let value_dim = layout.has_two_buffers().then_some(24);
        let batch = BatchSpec { value_dim, mask: Mask::FULL, ..spec(dtypes) }.batch();
        all.push(
            AttentionCase::flash(&batch, &MemoryLayout { spare_seqs: 0, ..MemoryLayout::paged(layout, 7) })
                .invocation(),
        );
        // No rows beside those of the sequences, since their slots may be ones that the debug check mode refuses.
        let paged = MemoryLayout { page_size: 7, workspace: None, rows_around: (0, 0), ..MemoryLayout::default() };
        all.push(AttentionCase::paged(&spec(dtypes).batch(), &paged).invocation());
        all.push(PagedUpdateCase::new(&spec(dtypes).batch(), &paged).invocation(true));
    }
    for dtype in ATTENTION_DTYPES {
        let batch = BatchSpec { value_dim: Some(24), ..spec(dtype.into()) }.batch();
        let memory_layout = MemoryLayout { spare_seqs: 0, ..MemoryLayout::contiguous() };
        all.push(GradientCase::store(&batch, &memory_layout, GradientOptions::ALL).invocation());
        let [a, b] = [1, 2].map(|seed| State::random(dtype, (5, 3, 24), &ANY_LSE, seed));
        all.push(a.merge(&b));
    }
    for layout in KvLayout::PAGED {
        for update in CacheUpdateCase::each_type(&[layout]).into_iter().step_by(5) {
            all.push(update.invocation(true));
            let rope = RopeCase { update, ..RopeCase::default() };
            all.extend((layout != KvLayout::Split).then(|| rope.invocation(true)));
        }
        all.push(GatherCase { layout, ..GatherCase::default() }.invocation());
        let scales = [None, Some(vec![0.5, 3.0])];
        all.push(GatherCase { layout, dtype: F8E4M3FN, out: BF16, scales, ..GatherCase::default() }.invocation());
    }
    all
}
