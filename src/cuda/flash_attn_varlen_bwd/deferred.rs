//! Parameters that are made when a launch is enqueued.

use crate::error::Result;
use std::cell::LazyCell;
use std::rc::Rc;

/// A parameter that is made once, by the first launch that needs it, and shared by the others.
pub(super) type DeferredParams<'p, P> = LazyCell<Result<P>, Box<dyn FnOnce() -> Result<P> + 'p>>;

/// Defers making the parameter until a launch is enqueued: `prepare` loads the kernels without it.
pub(super) fn defer_params<'p, P>(make: impl FnOnce() -> Result<P> + 'p) -> Rc<DeferredParams<'p, P>> {
    Rc::new(LazyCell::new(Box::new(make)))
}
