//! The device on which the operators' tests run: the CPU, through the handlers, or a GPU
//! (`XLA_ATTENTION_TEST_DEVICE=cuda`).

use super::{Array, Dtype, F32, HostPool, InlinePool, Invocation, Refusal, Side};

/// Whether the tests run on the CPU.
pub fn runs_on_cpu() -> bool {
    std::env::var("XLA_ATTENTION_TEST_DEVICE").map_or(true, |device| device == "cpu")
}

/// Whether the tests run on the emulator (`tests/emulator`).
pub fn on_emulator() -> bool {
    !runs_on_cpu() && std::env::var_os("XLA_ATTENTION_EMULATOR").is_some()
}

/// Bytes of shared memory that a CTA of the GPU may have; no limit on the CPU.
pub fn shared_memory() -> usize {
    #[cfg(feature = "cuda")]
    if !runs_on_cpu() {
        return super::device::Gpu::shared_memory();
    }
    usize::MAX
}

/// Whether the device has gradients of this dtype and head dimension: those of f32 past 256 take more shared memory than some GPUs
/// have.
pub fn has_gradients(dtype: Dtype, head_dim: usize) -> bool {
    dtype != F32 || head_dim <= 256 || shared_memory() > 128 * 1024
}

/// Calls that are chosen for the tiles of GPU kernels: all of them on a GPU, every seventh on the CPU, whose kernels have tests of their
/// own. What these tests vary from call to call mostly repeats after 2 to 6 calls, with which seven has no factor in common.
pub fn calls_for_tiles<Calls: IntoIterator>(calls: Calls) -> impl Iterator<Item = Calls::Item> {
    calls.into_iter().step_by(if runs_on_cpu() { 7 } else { 1 })
}

/// Whether to skip a test that takes more than 10 s on the CPU. CI, which sets `CI`, runs every test.
pub fn skips_slow_test() -> bool {
    let skips = runs_on_cpu() && std::env::var_os("CI").is_none();
    if skips {
        println!("skipped: more than 10 s on the CPU; CI=true runs it");
    }
    skips
}

impl Invocation {
    /// Calls the operator. Asserts that it changes nothing but its results. The pool is for the CPU.
    pub fn run(&self, side: Side, pool: &dyn HostPool) -> Result<Vec<Array>, Refusal> {
        #[cfg(feature = "cuda")]
        if let Some(outcome) = super::device::run_if_chosen(self, side) {
            return outcome;
        }
        self.run_on_cpu(side, pool)
    }

    /// The results of a call that must succeed.
    pub fn results(&self, side: Side) -> Vec<Array> {
        self.run(side, &InlinePool(4)).unwrap_or_else(|e| panic!("{} {}: {e:?}", self.target, self.description))
    }
}
