//! Damaged calls (tests/fuzz/damaged.rs) that libFuzzer chooses by the coverage that they give.
//!
//! An input is the number of a case of the conformance tables, a seed for the numbers in its buffers, and a list of changes.

#![no_main]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed step is a finding")]

#[path = "../../fuzz/attempt.rs"]
mod attempt;
#[path = "../../fuzz/mutation.rs"]
mod mutation;
#[path = "../../support/mod.rs"]
mod support;

use attempt::try_call;
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use mutation::{Mutation, Plan, Side};
use std::sync::LazyLock;
use support::array::Dtype;
use support::conformance::{Case, cases};
use support::guard::keep_mappings;
use support::invocation::Attr;

static CASES: LazyLock<Vec<&'static Case>> = LazyLock::new(|| {
    keep_mappings();
    cases().filter(|case| case.memory.is_none()).collect()
});

fn side(bytes: &mut Unstructured) -> Result<Side> {
    Ok(if bytes.arbitrary()? { Side::Operands } else { Side::Results })
}

fn index(bytes: &mut Unstructured) -> Result<usize> {
    Ok(bytes.arbitrary::<u8>()?.into())
}

/// Small ones take one byte.
fn size(bytes: &mut Unstructured) -> Result<i64> {
    let small: u8 = bytes.arbitrary()?;
    if small < 0xf0 { Ok(small.into()) } else { bytes.arbitrary() }
}

fn dtype(bytes: &mut Unstructured) -> Result<Dtype> {
    Ok(Dtype(bytes.arbitrary::<u8>()?.into()))
}

fn value(bytes: &mut Unstructured) -> Result<Attr> {
    Ok(match bytes.arbitrary::<u8>()? % 8 {
        0 => Attr::I32(bytes.arbitrary()?),
        1 => Attr::F64(bytes.arbitrary()?),
        2 => Attr::I64s(vec![1, 2]),
        3 => Attr::Text("a".to_owned()),
        4 => Attr::Bool(bytes.arbitrary()?),
        5 => Attr::F32(bytes.arbitrary()?),
        _ => Attr::I64(size(bytes)?),
    })
}

fn mutation(bytes: &mut Unstructured) -> Result<Mutation> {
    Ok(match bytes.arbitrary::<u8>()? % 16 {
        0 => Mutation::Size(side(bytes)?, index(bytes)?, index(bytes)?, size(bytes)?),
        1 => Mutation::Stride(side(bytes)?, index(bytes)?, index(bytes)?, size(bytes)?),
        2 => Mutation::Insert(side(bytes)?, index(bytes)?, index(bytes)?, size(bytes)?),
        3 => Mutation::Remove(side(bytes)?, index(bytes)?, index(bytes)?),
        4 => Mutation::Dtype(side(bytes)?, index(bytes)?, dtype(bytes)?),
        5 => Mutation::Retype(index(bytes)?, dtype(bytes)?),
        6 => Mutation::LeaveOut(side(bytes)?, index(bytes)?),
        7 => Mutation::Truncate(side(bytes)?, index(bytes)?),
        8 => Mutation::Append(side(bytes)?, index(bytes)?),
        9 => Mutation::Swap(side(bytes)?, index(bytes)?, index(bytes)?),
        10 => Mutation::Forget(index(bytes)?),
        11 => Mutation::Rename(index(bytes)?, bytes.choose(&["aardvark", "scale", "softmax_scale", "zebra"])?),
        12 | 13 => Mutation::Attribute(index(bytes)?, value(bytes)?),
        _ => Mutation::Resize(index(bytes)?, index(bytes)?, size(bytes)?),
    })
}

fn call(bytes: &mut Unstructured) -> Result<()> {
    let case = CASES[usize::from(bytes.arbitrary::<u16>()?) % CASES.len()];
    let seed: u16 = bytes.arbitrary()?;
    let mut plan = Plan::new(case);
    while !bytes.is_empty() {
        mutation(bytes)?.damage(&mut plan);
    }
    try_call(&plan, &case.aliases, seed.into());
    Ok(())
}

fuzz_target!(|bytes: &[u8]| {
    let _ = call(&mut Unstructured::new(bytes));
});
