//! What holds for all attention operators: the references themselves, and every pair of options.

mod case_layout;
mod gradients;
mod pairwise;
mod reference;
