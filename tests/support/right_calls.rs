//! The right call of every target, out of the tables of `tests/conformance`, with zeros in it: what tests of mistakes start
//! from.

use super::array::Array;
use super::conformance::{Case, cases, tables};
use super::invocation::{Attr, Invocation};

/// One call of each target.
pub fn all() -> Vec<Invocation> {
    tables().iter().flat_map(|table| table.interface.names.iter().map(|name| of(name))).collect()
}

/// The required operands and all results.
pub fn of(target: &str) -> Invocation {
    let named = |wanted: &str| cases().find(|case: &&Case| (case.target, case.name) == (target, wanted));
    let case = named("every optional result").or(named("the right call")).unwrap();
    let mut call = Invocation { what: String::new(), ..case.invocation(false) };
    for (_, operand) in &mut call.operands {
        *operand = Array::filled(operand.dtype, &operand.dims, 0);
    }
    call
}

/// `kv_cache_update` or `rope_kv_cache_update` of a cache in another layout, of the same 5 pages of 8 tokens.
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
