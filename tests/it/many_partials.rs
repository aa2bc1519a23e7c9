//! A few long sequences, whose tiles have so many partials that `combine_many` merges them: against the reference on every
//! device; and on a GPU, that this kernel was launched. The emulator has that many CTAs with `XLA_ATTENTION_EMULATOR_SMS=132`.

use crate::support::{
    AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F16, F32, Mask, MemoryLayout, assert_named_matches_reference,
    latent_workspace,
};

/// The calls of these are latent attention: more value columns than a warp has, and rows that a CTA has none of.
const LATENT: [(Dtypes, usize, [usize; 2]); 2] =
    [(Dtypes::same(BF16), 16, [576, 512]), (Dtypes::same(F16), 3, [200, 136])];

/// More and fewer than 32 partials per tile, a tile that has few beside a long one, and one without keys.
const LENGTHS: [&[(usize, usize)]; 3] = [&[(1, 6000)], &[(1, 3000), (1, 700)], &[(1, 2500), (1, 0), (2, 2600)]];

fn cases() -> Vec<(String, AttentionCase)> {
    let layout = |index: usize| MemoryLayout {
        workspace: Some(latent_workspace()),
        page_size: [16, 64, 24][index],
        rows_around: (2, 1),
        ..MemoryLayout::default()
    };
    let mut cases = vec![];
    for (index, lengths) in LENGTHS.into_iter().enumerate() {
        for (dtypes, heads, head_dim) in [
            (Dtypes::same(F32), (4, 1), 40),
            (Dtypes::over(BF16, F8E4M3FN), (4, 2), 128),
            (Dtypes::over(F16, F8E4M3FN), (2, 1), 256),
        ] {
            let spec = BatchSpec {
                dtypes,
                heads,
                head_dim,
                mask: Mask::CAUSAL,
                lengths: lengths.to_vec(),
                sinks: index == 1,
                seed: index as u64,
                ..BatchSpec::default()
            };
            cases.push((format!("{spec:?}"), AttentionCase::paged(&spec.batch(), &layout(index))));
        }
        for (dtypes, heads, dims) in LATENT {
            let spec = BatchSpec { mask: Mask::CAUSAL, ..BatchSpec::latent(dtypes, heads, dims, lengths) };
            cases.push((format!("{spec:?}"), AttentionCase::latent(&spec.batch(), &layout(index))));
        }
    }
    cases
}

#[test]
fn they_are_merged_as_the_reference_says() {
    for (name, mut case) in cases() {
        assert_named_matches_reference(&name, &mut case);
    }
}

#[cfg(feature = "cuda")]
mod on_their_own_gpu {
    use super::cases;
    use crate::support::device::{BufferPadding, Gpu};
    use crate::support::log_capture::{assert_logged, log};

    /// Short, with a call of every variant: the slower tools of compute-sanitizer run it (tests/gpu/run.py).
    #[test]
    fn the_kernel_is_chosen() {
        let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
        if Gpu::sms() < 100 {
            println!("skipped: so few SMs leave tiles with few partials");
            return;
        }
        let log = log();
        for (_, case) in cases().into_iter().take(5) {
            case.invocation().run_on_gpu(&gpu, BufferPadding::Redzones, 0).unwrap();
        }
        for dtype in ["f16", "bf16", "f32"] {
            assert_logged(log, &format!("combine_many_{dtype} with"));
        }
    }
}
