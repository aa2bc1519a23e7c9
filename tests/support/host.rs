//! Runs invocations in guarded host memory through the CPU handlers.

use super::{Array, CPU, Frame, Guarded, HostPool, Invocation, Placed, Refusal, Side, announce};

impl Invocation {
    /// The buffers of the call, each against a guard page.
    pub fn guarded(&self, side: Side) -> Placed<'_, Guarded> {
        Placed::new(self, |name, array| Guarded::new(name, side, &array.bytes))
    }

    /// Call the CPU handler.
    pub fn run_on_cpu(&self, side: Side, pool: &dyn HostPool) -> Result<Vec<Array>, Refusal> {
        self.run_in(Frame::new(self.target, CPU).pool(pool), side)
    }

    /// The results of a frame's handler, or its error, whatever a call that failed has written.
    pub fn outcome_in(&self, frame: Frame<'_>) -> Result<Vec<Array>, Refusal> {
        let placed = self.guarded(Side::EndsAtGuard);
        placed.frame(frame).run().map(|()| placed.results())
    }

    /// Call a frame's handler with every buffer against a guard page, and look at everything it must not have changed.
    pub fn run_in(&self, frame: Frame<'_>, side: Side) -> Result<Vec<Array>, Refusal> {
        announce(&format!("{} {} {side:?}", self.target, self.what));
        let placed = self.guarded(side);
        let outcome = placed.frame(frame).run();
        match outcome {
            Ok(()) => Ok(placed.results()),
            Err(refusal) => {
                placed.assert_untouched();
                Err(refusal)
            }
        }
    }
}
