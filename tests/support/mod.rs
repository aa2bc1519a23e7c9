//! What the tests of the operators stand on: numbers, memory with guard pages, hand-made call frames, references, cases.
//!
//! [`array`], [`oracle`], [`cases`] and [`invocation`] describe calls as bytes, shapes and attributes and know no machine;
//! [`guard`], [`frame`] and [`host`] run them in host memory through the real handlers, [`device`] in memory of a GPU;
//! [`machine`] chooses.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of the support")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "a failed step is a failed test"
)]

pub mod array;
pub mod c_structs;
pub mod cases;
#[cfg(feature = "cuda")]
pub mod device;
pub mod frame;
pub mod guard;
pub mod host;
pub mod invocation;
pub mod machine;
pub mod mock_api;
pub mod oracle;
pub mod pools;
pub mod random;
pub mod right_calls;
pub mod strategies;
