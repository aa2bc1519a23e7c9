//! Packed and paged keys share one implementation: [`super::attention`].

pub(crate) use super::attention::{launch, prepare};
