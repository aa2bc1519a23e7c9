//! Where the operators' tests run: through the CPU handlers, or, with `XLA_ATTENTION_TEST_DEVICE=cuda`, on the GPU.

use super::{Array, HostPool, InlinePool, Invocation, Refusal, Side};

/// The environment does not choose the GPU.
pub fn runs_on_cpu() -> bool {
    std::env::var("XLA_ATTENTION_TEST_DEVICE").map_or(true, |device| device == "cpu")
}

impl Invocation {
    /// Call the operator and look at everything that it must not have changed. The pool serves on the CPU only.
    pub fn run(&self, side: Side, pool: &dyn HostPool) -> Result<Vec<Array>, Refusal> {
        #[cfg(feature = "cuda")]
        if let Some(outcome) = super::device::run_if_chosen(self, side) {
            return outcome;
        }
        self.run_on_cpu(side, pool)
    }

    /// The results of a call that has to succeed.
    pub fn results(&self, side: Side) -> Vec<Array> {
        self.run(side, &InlinePool(4)).unwrap_or_else(|e| panic!("{} {}: {e:?}", self.target, self.what))
    }
}
