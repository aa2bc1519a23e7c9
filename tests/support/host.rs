//! Runs invocations in guarded host memory through the CPU handlers.

use super::array::Array;
use super::frame::{Buffer, CPU, Frame, Refusal};
use super::guard::{Side, announce};
use super::invocation::{Invocation, Outcome, POISON};
use super::pools::HostPool;

impl Invocation {
    /// Call the CPU handler.
    pub fn run_on_cpu(&self, side: Side, pool: &dyn HostPool) -> Result<Vec<Array>, Refusal> {
        self.run_in(Frame::new(self.target, CPU).pool(pool), side)
    }

    /// The results of a frame's handler, or its error, whatever a call that failed has written.
    pub fn outcome_in(&self, frame: Frame<'_>) -> Result<Vec<Array>, Refusal> {
        let side = Side::EndsAtGuard;
        let operands: Vec<Buffer> = self.operands.iter().map(|(name, a)| Buffer::place(name, side, a)).collect();
        let poisoned = |r: &Outcome| Buffer::place(r.name, side, &Array::filled(r.dtype, &r.dims, POISON));
        let results: Vec<Buffer> = self.results.iter().map(poisoned).collect();
        let frame = operands.iter().fold(frame.attributes(&self.attributes), Frame::operand);
        results.iter().fold(frame, Frame::result).run()?;
        let array = |b: &Buffer| Array { dtype: b.dtype, dims: b.dims.clone(), bytes: b.memory.bytes() };
        Ok(results.iter().map(array).collect())
    }

    /// Call a frame's handler with every buffer against a guard page, and look at everything it must not have changed.
    pub fn run_in(&self, frame: Frame<'_>, side: Side) -> Result<Vec<Array>, Refusal> {
        announce(&format!("{} {} {side:?}", self.target, self.what));
        let operands: Vec<Buffer> = self.operands.iter().map(|(n, a)| Buffer::place(n, side, a)).collect();
        let results: Vec<Option<Buffer>> = self
            .results
            .iter()
            .map(|r| {
                let poison = Array::filled(r.dtype, &r.dims, POISON);
                r.alias.is_none().then(|| Buffer::place(&format!("result {}", r.name), side, &poison))
            })
            .collect();
        let result_of = |i: usize| results[i].as_ref().unwrap_or_else(|| &operands[self.results[i].alias.unwrap()]);
        let frame = frame.attributes(&self.attributes);
        let frame = operands.iter().fold(frame, Frame::operand);
        let frame = (0..results.len()).fold(frame, |frame, i| frame.result(result_of(i)));
        let outcome = frame.run();

        for (index, (name, given)) in self.operands.iter().enumerate() {
            operands[index].memory.assert_slack_untouched();
            if outcome.is_err() || self.results.iter().all(|r| r.alias != Some(index)) {
                assert!(
                    operands[index].memory.bytes() == given.bytes,
                    "{} {}: {name} has changed",
                    self.target,
                    self.what
                );
            }
        }
        for (buffer, result) in results.iter().zip(&self.results) {
            let Some(buffer) = buffer else { continue };
            buffer.memory.assert_slack_untouched();
            let untouched = outcome.is_ok() || buffer.memory.bytes().iter().all(|&b| b == POISON);
            assert!(untouched, "{} {}: {} was written by a refused call", self.target, self.what, result.name);
        }
        outcome?;
        let array = |i: usize| Array {
            dtype: self.results[i].dtype,
            dims: self.results[i].dims.clone(),
            bytes: result_of(i).memory.bytes(),
        };
        Ok((0..results.len()).map(array).collect())
    }
}
