//! Runs invocations in guarded host memory through the CPU handlers.

use super::{Array, CPU, CallBuffers, Frame, GuardedBuffer, HostPool, Invocation, Refusal, Side, announce};

impl Invocation {
    /// The buffers of the call, each against a guard page.
    pub fn guarded(&self, side: Side) -> CallBuffers<'_, GuardedBuffer> {
        CallBuffers::new(self, |name, array| GuardedBuffer::new(name, side, &array.bytes))
    }

    /// Call the CPU handler.
    pub fn run_on_cpu(&self, side: Side, pool: &dyn HostPool) -> Result<Vec<Array>, Refusal> {
        self.run_in(Frame::new(self.target, CPU).pool(pool), side)
    }

    /// The results of a frame's handler, or its error, whatever a call that failed has written.
    pub fn outcome_in(&self, frame: Frame<'_>) -> Result<Vec<Array>, Refusal> {
        let buffers = self.guarded(Side::EndsAtGuard);
        buffers.frame(frame).run().map(|()| buffers.results())
    }

    /// Call a frame's handler with every buffer against a guard page, and look at everything it must not have changed.
    pub fn run_in(&self, frame: Frame<'_>, side: Side) -> Result<Vec<Array>, Refusal> {
        announce(&format!("{} {} {side:?}", self.target, self.what));
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
