//! What holds for both attention operators: the reference itself, and every pair of their options.

mod pairwise;
mod reference;
mod stored;
