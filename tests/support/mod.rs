//! What the tests of the operators stand on: numbers, memory with guard pages, hand-made call frames, references, cases.
//!
//! [`array`], [`batch`], [`storage`], [`case`], [`gradient_case`], [`cache_updates`], [`rotations`], [`states`],
//! [`steps`] and [`invocation`] describe calls as numbers, bytes, shapes and attributes, [`oracle`], [`gradients`] and
//! [`answers`] what has to come out of them; these know no machine. [`placed`] puts calls into memory; [`guard`], [`frame`]
//! and [`host`] run them in host memory through the real handlers, [`device`] in memory of a GPU, [`entry`] in any; [`machine`] chooses.

#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test binary uses its own part of the support")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "a failed step is a failed test"
)]

/// A structure and the value that each of its fields has by default.
macro_rules! with_defaults {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$doc:meta])* pub $field:ident: $type:ty = $value:expr,)*
    }) => {
        $(#[$meta])*
        pub struct $name { $($(#[$doc])* pub $field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $value,)* }
            }
        }
    };
}

mod answers;
mod array;
mod batch;
mod c_interface;
pub mod c_structs;
mod cache_updates;
mod case;
mod check;
pub mod conformance;
pub mod cost;
#[cfg(feature = "cuda")]
pub mod device;
mod entry;
mod frame;
mod gathers;
mod gradient_case;
mod gradients;
mod guard_page;
mod host;
mod invocation;
#[cfg(feature = "cuda")]
pub mod logged;
mod machine;
pub mod mock_api;
mod named_shapes;
mod option_pairs;
mod oracle;
mod pairwise;
mod placed;
mod pools;
mod random;
pub mod right_calls;
mod rotations;
mod spread;
#[cfg(feature = "cuda")]
pub mod stand_in;
mod states;
mod steps;
mod storage;
mod strategies;
mod summary;
mod sums;

pub use self::{
    answers::*, array::*, batch::*, c_interface::*, cache_updates::*, case::*, check::*, entry::*, frame::*,
    gathers::*, gradient_case::*, gradients::*, guard_page::*, host::*, invocation::*, machine::*, named_shapes::*,
    option_pairs::*, oracle::*, pairwise::*, placed::*, pools::*, random::*, rotations::*, spread::*, states::*,
    steps::*, storage::*, strategies::*, summary::*, sums::*,
};
