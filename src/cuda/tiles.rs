//! The tile tables of `kernels/variants.toml`: one static array per table. The launch code adds methods to their rows.

#![allow(clippy::unreadable_literal, dead_code, reason = "written by build_support/variants.rs; kernels read the rest")]

include!(concat!(env!("OUT_DIR"), "/tiles.rs"));
