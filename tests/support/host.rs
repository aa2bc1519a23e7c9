//! Runs invocations through the CPU handlers, with buffers between guard pages.

use super::{Array, CPU, CallBuffers, Frame, GuardedBuffer, HostPool, Invocation, Refusal, Side, announce};

impl Invocation {
    /// The buffers of the call, each of which touches a guard page.
    pub fn guarded(&self, side: Side) -> CallBuffers<'_, GuardedBuffer> {
        CallBuffers::new(self, |name, array| GuardedBuffer::new(name, side, &array.bytes))
    }

    /// Calls the CPU handler.
    pub fn run_on_cpu(&self, side: Side, pool: &dyn HostPool) -> Result<Vec<Array>, Refusal> {
        self.run_in(Frame::new(self.target, CPU).pool(pool), side)
    }

    /// Calls the frame's handler. The buffers of a refused call are not looked at.
    pub fn outcome_in(&self, frame: Frame<'_>) -> Result<Vec<Array>, Refusal> {
        let buffers = self.guarded(Side::EndsAtGuard);
        buffers.frame(frame).run().map(|()| buffers.results())
    }

    /// Calls the frame's handler. Asserts that a successful call changes nothing but its results, and that a refused
    /// call changes nothing.
    pub fn run_in(&self, frame: Frame<'_>, side: Side) -> Result<Vec<Array>, Refusal> {
        announce(&format!("{} {} {side:?}", self.target, self.description));
        let buffers = self.guarded(side);
        let outcome = buffers.frame(frame).run();
        match outcome {
            Ok(()) => Ok(buffers.results()),
            Err(refusal) => {
                buffers.assert_untouched();
                Err(refusal)
            }
        }
    }
}
