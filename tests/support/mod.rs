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

mod array;
mod attention_case;
mod attention_states;
mod batch;
mod c_interface;
pub mod c_structs;
mod cache_update_case;
mod call_buffers;
mod call_frame;
pub mod conformance;
pub mod cost;
mod covering_array;
#[cfg(feature = "cuda")]
pub mod device;
mod expected_rows;
#[cfg(feature = "cuda")]
pub mod fake_libcuda;
mod gather_case;
mod gradient_case;
mod gradients;
mod guard_page;
mod host;
mod invocation;
mod library_call;
#[cfg(feature = "cuda")]
pub mod log_capture;
mod memory_layout;
pub mod mock_api;
mod named_batches;
mod oracle;
mod paged_update_case;
mod pairwise_options;
mod pools;
mod random;
mod random_calls;
mod reference_case;
mod rope_case;
mod simple_add;
mod strided;
mod summary;
mod test_device;
pub mod valid_calls;

pub use self::{
    array::*, attention_case::*, attention_states::*, batch::*, c_interface::*, cache_update_case::*, call_buffers::*,
    call_frame::*, covering_array::*, expected_rows::*, gather_case::*, gradient_case::*, gradients::*, guard_page::*,
    host::*, invocation::*, library_call::*, memory_layout::*, named_batches::*, oracle::*, paged_update_case::*,
    pairwise_options::*, pools::*, random::*, random_calls::*, reference_case::*, rope_case::*, simple_add::*,
    strided::*, summary::*, test_device::*,
};
