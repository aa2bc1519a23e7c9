//! [`super::attention`], which reads a latent row once as a key and once as a value.

pub(crate) use super::attention::run;
