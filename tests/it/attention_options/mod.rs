//! Tests of the references themselves, and of every pair of options.

mod case_layout;
mod gradients;
mod pairwise;
mod reference;
