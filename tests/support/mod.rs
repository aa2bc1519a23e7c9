//! What the tests share.
//!
//! Calls as numbers, bytes, shapes and attributes, independent of a device: [`array`], [`batch`], [`memory_layout`],
//! [`invocation`], and for the operators [`attention_case`], [`gradient_case`], [`paged_update_case`],
//! [`cache_update_case`], [`rope_case`], [`gather_case`], [`attention_states`] and [`simple_add`]. The reference is in
//! [`oracle`] and [`gradients`], and [`expected_rows`] compares results with it.
//!
//! [`call_buffers`] puts a call into memory. [`guard_page`], [`call_frame`] and [`host`] run it in host memory through
//! the real handlers, [`device`] runs it on a GPU, and [`library_call`] calls the library below its handlers.
//! [`test_device`] chooses where.

#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test binary uses its own part of the support")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "a failed step is a failed test"
)]

/// Declares a structure whose fields have default values.
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
mod mla_case;
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
mod scaled_cache;
mod simple_add;
mod stored_keys;
mod strided;
mod summary;
mod test_device;
mod tree_mask;
pub mod valid_calls;

pub use self::{
    array::*, attention_case::*, attention_states::*, batch::*, c_interface::*, cache_update_case::*, call_buffers::*,
    call_frame::*, covering_array::*, expected_rows::*, gather_case::*, gradient_case::*, gradients::*, guard_page::*,
    host::*, invocation::*, library_call::*, memory_layout::*, mla_case::*, named_batches::*, oracle::*,
    paged_update_case::*, pairwise_options::*, pools::*, random::*, random_calls::*, reference_case::*, rope_case::*,
    scaled_cache::*, simple_add::*, strided::*, summary::*, test_device::*, tree_mask::*,
};
