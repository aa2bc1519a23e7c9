//! Attention, whatever its keys lie in: [`super::attention`].

pub(crate) use super::attention::{launch, prepare};
