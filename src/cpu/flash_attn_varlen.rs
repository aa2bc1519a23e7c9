//! [`super::attention`], which handles packed and paged keys alike.

pub(crate) use super::attention::run;
