//! The tiles of `kernels/variants.toml`, each table a static of rows. The launches ask them for what follows from a row.

#![allow(clippy::unreadable_literal, dead_code, reason = "written by build_support/variants.rs; kernels read the rest")]

include!(concat!(env!("OUT_DIR"), "/tiles.rs"));
