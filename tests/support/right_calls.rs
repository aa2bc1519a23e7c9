//! The right call of every target, out of the tables of `tests/conformance`, with zeros in it: what tests of mistakes start
//! from.

use super::array::{Array, Dtype};
use super::conformance::{Case, cases, tables};
use super::invocation::{Attr, Invocation};

pub fn zeros(dtype: Dtype, dims: &[i64]) -> Array {
    Array::filled(dtype, dims, 0)
}

/// One call of each target.
pub fn all() -> Vec<Invocation> {
    tables().iter().flat_map(|table| table.interface.names.iter().map(|name| of(name))).collect()
}

/// The required operands and all results.
fn of(target: &str) -> Invocation {
    let named = |wanted: &str| cases().find(|case: &&Case| (case.target, case.name) == (target, wanted));
    let case = named("every optional result").or(named("the right call")).unwrap();
    let mut call = Invocation { what: String::new(), ..case.invocation(false) };
    for (_, operand) in &mut call.operands {
        *operand = zeros(operand.dtype, &operand.dims);
    }
    call
}

/// Two arrays `[2, 3]`.
pub fn simple_add() -> Invocation {
    of("xla_gpu_simple_add")
}

/// T 6, Hq 4, Hkv 2, D 16, 5 pages of 8 tokens, 3 sequence slots with 2 pages each.
pub fn paged_attention() -> Invocation {
    of("xla_gpu_paged_attention").attribute("sliding_window", Attr::I64(-1))
}

/// As [`paged_attention`], with the rows of the tokens that ask and their slots.
pub fn paged_attention_update() -> Invocation {
    of("xla_gpu_paged_attention_update").attribute("sliding_window", Attr::I64(-1))
}

/// Tq 6, Hq 4, Hkv 2, D 16, Dv 24, Tk 10, B 3, without a mask.
pub fn flash_attn_varlen() -> Invocation {
    of("xla_gpu_flash_attn_varlen")
}

/// As [`flash_attn_varlen`], with Tk 6 and the gradients of both results.
pub fn flash_attn_varlen_bwd() -> Invocation {
    of("xla_gpu_flash_attn_varlen_bwd")
}

/// N 24, Hkv 2, D 16, Dv 24, 5 pages of 8 tokens, 3 sequences with 2 pages each.
pub fn gather_kv_cache() -> Invocation {
    of("xla_gpu_gather_kv_cache")
}

/// T 6, Hkv 2, D 16, 5 pages of 8 tokens.
pub fn kv_cache_update(layout: i64) -> Invocation {
    in_layout(of("xla_gpu_kv_cache_update"), layout)
}

/// T 6, Hkv 2, D 16, Dv 24, 5 pages of 8 tokens.
pub fn kv_cache_update_split() -> Invocation {
    of("xla_gpu_kv_cache_update_split")
}

/// T 6, Hq 4, Hkv 2, D 16, 5 pages of 8 tokens, 9 positions of which 12 elements turn.
pub fn rope_kv_cache_update(layout: i64) -> Invocation {
    in_layout(of("xla_gpu_rope_kv_cache_update"), layout)
}

/// n 6, h 4, d 20.
pub fn merge_attention_states() -> Invocation {
    of("xla_gpu_merge_attention_states")
}

/// An update of another cache.
fn in_layout(mut call: Invocation, layout: i64) -> Invocation {
    let dims: &[i64] = match layout {
        2 => &[2, 5, 8, 2, 16],
        3 => &[5, 2, 8, 2, 16],
        _ => &[5, 8, 4, 16],
    };
    let cache = &mut call.operands[0].1;
    *cache = zeros(cache.dtype, dims);
    call.results[0].dims = dims.to_vec();
    call.attribute("kv_layout", Attr::I64(layout))
}
