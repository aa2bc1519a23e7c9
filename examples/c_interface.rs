//! Uses the C interface, as a program in any language could: prints the handler table that a PJRT runtime registers, and
//! calls an operator directly.
//!
//! `cargo run --example c_interface`

#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::ffi::{CStr, c_char};
use std::ptr::{null, null_mut};
use xla_attention::{XaAttribute, XaCall, XaTensor, xa_call, xa_op, xa_targets};

/// XLA's numbers of element types.
const I32: i32 = 4;
const F32: i32 = 11;

/// A dense tensor at an address.
fn tensor<T>(data: *const T, dims: &'static [i64], dtype: i32) -> XaTensor {
    XaTensor { data: data.cast_mut().cast(), dims: dims.as_ptr(), strides: null(), rank: dims.len() as i32, dtype }
}

fn main() -> Result<(), String> {
    // SAFETY: the table and its strings live as long as the library.
    let table = unsafe { &*xa_targets() };
    println!("handlers of XLA FFI {}.{}:", table.api_major, table.api_minor);
    // SAFETY: as above; `count` rows.
    for row in unsafe { std::slice::from_raw_parts(table.rows, table.count) } {
        // SAFETY: as above.
        let (name, platform) = unsafe { (CStr::from_ptr(row.name), CStr::from_ptr(row.platform)) };
        let stages = if row.initialize.is_some() { "initialize, execute" } else { "execute" };
        println!("  {} on {}: {stages}", name.to_string_lossy(), platform.to_string_lossy());
    }

    // One sequence with two keys in page 1, and its last token as the query: one head, D 8.
    let query = [1.0f32; 8];
    let mut kv_cache = [f32::NAN; 2 * 4 * 2 * 8]; // [P, page_size, 2 * Hkv, D]
    for (token, value) in [(4, 10.0), (5, 30.0)] {
        kv_cache[token * 16..][..8].fill(0.0); // K: both keys score the same
        kv_cache[token * 16 + 8..][..8].fill(value);
    }
    let (context_lens, block_tables, query_start_loc, num_seqs) = ([2i32], [1i32], [0i32, 1], [1i32]);
    let mut out = [0.0f32; 8];
    let operands = [
        tensor(query.as_ptr(), &[1, 1, 8], F32),
        tensor(kv_cache.as_ptr(), &[2, 4, 2, 8], F32),
        tensor(context_lens.as_ptr(), &[1], I32),
        tensor(block_tables.as_ptr(), &[1, 1], I32),
        tensor(query_start_loc.as_ptr(), &[2], I32),
        tensor(num_seqs.as_ptr(), &[1], I32),
    ];
    let results = [tensor(out.as_mut_ptr(), &[1, 1, 8], F32)];
    // In alphabetical order: batch_invariant, scale, sliding_window, soft_cap.
    let attributes = [
        XaAttribute { kind: 0, real: 0.0, integer: 0 },
        XaAttribute { kind: 2, real: 0.5, integer: 0 },
        XaAttribute { kind: 1, real: 0.0, integer: -1 },
        XaAttribute { kind: 2, real: 0.0, integer: 0 },
    ];
    let request = XaCall {
        struct_size: size_of::<XaCall>(),
        // SAFETY: a terminated string.
        op: unsafe { xa_op(c"xla_gpu_paged_attention".as_ptr()) },
        action: 1, // run on the CPU
        operands: operands.as_ptr(),
        num_operands: operands.len(),
        results: results.as_ptr(),
        num_results: results.len(),
        attributes: attributes.as_ptr(),
        num_attributes: attributes.len(),
        stream: null_mut(),
        addresses: null(),
        num_addresses: 0,
    };
    let mut message = [0 as c_char; 256];
    // SAFETY: the request's pointers are those of the arrays above, which outlive the call.
    let code = unsafe { xa_call(&raw const request, message.as_mut_ptr(), message.len()) };
    if code != 0 {
        // SAFETY: the library terminates what it writes.
        return Err(unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy().into_owned());
    }
    println!("the mean of 10 and 30: {}", out[0]);
    if (out[0] - 20.0).abs() < 1e-5 { Ok(()) } else { Err(format!("expected 20, found {}", out[0])) }
}
