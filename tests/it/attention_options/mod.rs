//! What holds for all attention operators: the references themselves, and every pair of options.

mod gradients;
mod pairwise;
mod reference;
mod stored;
