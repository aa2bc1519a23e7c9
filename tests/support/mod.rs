//! What the tests of the operators stand on: numbers, memory with guard pages, hand-made call frames, references, cases.
//!
//! [`array`], [`batch`], [`storage`], [`case`], [`gradient_case`], [`cache_updates`], [`rotations`], [`states`],
//! [`steps`] and [`invocation`] describe calls as numbers, bytes, shapes and attributes, [`oracle`], [`gradients`] and
//! [`answers`] what has to come out of them; these know no machine. [`guard`], [`frame`] and [`host`] run them in host
//! memory through the real handlers, [`device`] in memory of a GPU, [`entry`] in any; [`machine`] chooses.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of the support")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "a failed step is a failed test"
)]

pub mod answers;
pub mod array;
pub mod batch;
pub mod c_structs;
pub mod cache_updates;
pub mod case;
pub mod check;
pub mod conformance;
pub mod cost;
#[cfg(feature = "cuda")]
pub mod device;
pub mod entry;
pub mod frame;
pub mod gathers;
pub mod gradient_case;
pub mod gradients;
pub mod guard;
pub mod host;
pub mod invocation;
#[cfg(feature = "cuda")]
pub mod logged;
pub mod machine;
pub mod mock_api;
pub mod named_shapes;
pub mod option_pairs;
pub mod oracle;
pub mod pairwise;
pub mod pools;
pub mod random;
pub mod right_calls;
pub mod rotations;
pub mod spread;
#[cfg(feature = "cuda")]
pub mod stand_in;
pub mod states;
pub mod steps;
pub mod storage;
pub mod strategies;
pub mod summary;
pub mod sums;
