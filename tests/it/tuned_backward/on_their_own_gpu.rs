//! On Hopper: which kernels were launched, and that runs have the same bits.

use super::{
    Alibi, BF16, BatchSpec, BiasForm, F16, F32, GradientCase, GradientOptions, Mask, MemoryLayout, large_workspace,
    of_both_types, portable_workspace,
};
use crate::support::device::{BufferPadding, Gpu};
use crate::support::log_capture::{assert_logged, log};
use crate::support::{AttentionCase, KeyBounds};

/// D, Dv and the value of the kernels' axis `head_dim`.
const HEAD_DIMS: [(usize, usize, &str); 6] =
    [(64, 64, "64"), (96, 96, "96"), (128, 128, "128"), (192, 128, "192x128"), (192, 192, "192"), (256, 256, "256")];

/// The value of the kernels' axis `logits`, and the options that select it.
const LOGITS: [(&str, f32, Alibi, KeyBounds, Option<BiasForm>); 6] = [
    ("none", 0.0, Alibi::Off, KeyBounds::None, None),
    ("softcap", 2.0, Alibi::Off, KeyBounds::None, None),
    ("alibi", 0.0, Alibi::PerHead, KeyBounds::None, None),
    ("key_ranges", 0.0, Alibi::Off, KeyBounds::Both, None),
    ("bias", 0.0, Alibi::Off, KeyBounds::None, Some(BiasForm::OWN)),
    ("bias_f32", 0.0, Alibi::Off, KeyBounds::None, Some(BiasForm { dtype: Some(F32), ..BiasForm::OWN })),
];

/// Run under compute-sanitizer's slower tools: short, with a call of every kernel.
#[test]
fn tuned_backward_kernels_are_chosen() {
    let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
    let log = log();
    for (dtype, name) in [(BF16, "bf16"), (F16, "f16")] {
        for ((head_dim, value_dim, dims), (logits, softcap, alibi, key_bounds, bias)) in
            HEAD_DIMS.into_iter().flat_map(|d| LOGITS.map(|logits| (d, logits)))
        {
            let has_ranges = key_bounds != KeyBounds::None;
            if (has_ranges || bias.is_some()) && head_dim > 128 {
                continue;
            }
            // The first call per head dimension has more tiles than an H200 has SMs, and several query blocks in each.
            let is_first = (dtype, logits) == (BF16, "none");
            let (heads, lengths) = if is_first { (24, (900, 1000)) } else { (2, (200, 304)) };
            let (dtypes, heads, lengths) = (dtype.into(), (heads, heads), vec![lengths]);
            let value_dim = Some(value_dim);
            let spec =
                BatchSpec { dtypes, heads, head_dim, value_dim, lengths, softcap, alibi, ..BatchSpec::default() };
            run(&gpu, &BatchSpec { key_bounds, bias, ..spec });
            let main = if head_dim <= 128 { "hopper_bwd" } else { "hopper_bwd_wide" };
            assert_logged(log, &format!("hopper_bwd_prepare_{name}_{head_dim} with"));
            assert_logged(log, &format!("{main}_{name}_{dims}_{logits} with"));
            if has_ranges {
                assert_logged(log, &format!("hopper_bwd_plan_ranges_{dims} with"));
            }
        }
    }
    let runs_kernel = |spec: &BatchSpec, kernel: &str| {
        run(&gpu, spec);
        assert_logged(log, kernel);
    };
    let base = BatchSpec { dtypes: BF16.into(), heads: (2, 1), lengths: vec![(30, 40)], ..BatchSpec::default() };
    let both = BatchSpec { softcap: 2.0, alibi: Alibi::PerHead, head_dim: 128, ..base.clone() };
    runs_kernel(&both, "attention_bwd_dq_bf16_128_small_softcap_alibi with");
    let wide_both = BatchSpec { head_dim: 256, ..both };
    runs_kernel(&wide_both, "attention_bwd_dq_bf16_256_small_softcap_alibi with");
    let bounded = BatchSpec { key_bounds: KeyBounds::End, head_dim: 256, ..base.clone() };
    runs_kernel(&bounded, "attention_bwd_dq_bf16_256_key_ranges_softcap_alibi with");
    let one_kv_head = BatchSpec { heads: (16, 1), lengths: vec![(200, 240)], mask: Mask::CAUSAL, ..base.clone() };
    runs_kernel(&one_kv_head, "hopper_bwd_combine_bf16 with");
    for (head_dim, bias) in [(64, BiasForm::SHARED), (128, BiasForm { per_head: true, ..BiasForm::SHARED })] {
        let lengths = vec![(200, 304), (30, 40)];
        let shared = BatchSpec { head_dim, lengths, bias: Some(bias), ..base.clone() };
        for (spec, of_type) in of_both_types(shared).into_iter().zip(["16_bits", "f32"]) {
            runs_kernel(&spec, &format!("hopper_bwd_dbias_bf16_{head_dim}_{of_type} with"));
        }
    }
    // Rows of 301 keys are copied, each by a warp of eight; the batch has two empty sequences more.
    for (rows, form, head_dim, mask, copied) in
        [(160, BiasForm::OWN, 96, Mask::FULL, 3 * 2 * 160), (200, BiasForm::SHARED, 64, Mask::CAUSAL, 200)]
    {
        let odd = BatchSpec { head_dim, lengths: vec![(rows, 301)], bias: Some(form), mask, ..base.clone() };
        runs_kernel(&odd, &format!("copy_bias_rows with LaunchConfig {{ grid: [{}, 1, 1]", copied / 8));
    }
    // The portable kernels store the gradient of each pair's own bias where it belongs.
    for (head_dim, mask) in [(64, Mask::FULL), (96, Mask::CAUSAL)] {
        let bias = Some(BiasForm::OWN);
        let own = BatchSpec { head_dim, lengths: vec![(160, 301)], bias, mask, ..base.clone() };
        let bucket = if head_dim == 64 { "64" } else { "128" };
        runs_kernel(&own, &format!("attention_bwd_dq_from_ds_bf16_{bucket}_shifted with"));
    }
    let run_portable = |spec: &BatchSpec, kernels: &[&str]| {
        let layout = portable_workspace(spec);
        let case = GradientCase::of_any_results(AttentionCase::flash(&spec.batch(), &layout), GradientOptions::ALL);
        case.invocation().assert_logs(&gpu, kernels);
    };
    for (head_dim, keys) in [(64, 304), (128, 301)] {
        let few = BatchSpec { heads: (8, 1), head_dim, lengths: vec![(40, keys); 1], ..base.clone() };
        let shared = BatchSpec { bias: Some(BiasForm::SHARED), ..few };
        let layout = MemoryLayout { spare_seqs: 16, ..large_workspace() };
        let forward = AttentionCase::flash(&shared.batch(), &layout);
        let case = GradientCase::of_any_results(forward, GradientOptions::ALL);
        let from_ds = format!("attention_bwd_dq_from_ds_bf16_{head_dim}_aligned with");
        case.invocation().assert_logs(&gpu, &[&from_ds, "attention_bwd_dbias_sum_bf16 with"]);
        let odd = BatchSpec { head_dim, lengths: vec![(200, keys), (30, 40)], ..base.clone() };
        let of_shape = format!("attention_bwd_dq_bf16_{head_dim}_bias_aligned_none with");
        let summing = format!("attention_bwd_dbias_aligned_bf16_{head_dim} with");
        run_portable(&BatchSpec { bias: Some(BiasForm::SHARED), ..odd.clone() }, &[&of_shape, &summing]);
        let own = BatchSpec { bias: Some(BiasForm::OWN), ..odd };
        let rows = if keys == 301 { "shifted" } else { "aligned" };
        let dkdv = format!("attention_bwd_dkdv_bf16_{head_dim}_bias_{rows}_none with");
        let from_ds = format!("attention_bwd_dq_from_ds_bf16_{head_dim}_{rows} with");
        run_portable(&own, &["attention_bwd_delta_bf16 with", &dkdv, &from_ds]);
    }
    for (head_dim, of_dim) in [(192, "256"), (320, "512")] {
        for (form, keys, rows, other) in [
            (BiasForm::OWN, 304, "aligned", "attention_bwd_delta_bf16 with"),
            (BiasForm::OWN, 301, "shifted", "attention_bwd_delta_bf16 with"),
            (BiasForm::SHARED, 304, "aligned", "attention_bwd_dbias_sum_bf16 with"),
        ] {
            let wide = BatchSpec { head_dim, lengths: vec![(40, keys)], bias: Some(form), ..base.clone() };
            let forward = AttentionCase::flash(&wide.batch(), &large_workspace());
            let from_ds = format!("attention_bwd_dq_from_ds_bf16_{of_dim}_{rows} with");
            let dkdv = format!("attention_bwd_dkdv_bf16_{of_dim}_bias_large_none with");
            let case = GradientCase::of_any_results(forward, GradientOptions::ALL);
            case.invocation().assert_logs(&gpu, &[other, &dkdv, &from_ds]);
        }
    }
    let short = vec![(3, 40); 40];
    runs_kernel(
        &BatchSpec { heads: (8, 1), lengths: short, head_dim: 64, ..base },
        "attention_bwd_dq_bf16_64_small_none with",
    );
}

#[test]
fn runs_have_the_same_bits() {
    // The emulator runs CTAs one after another.
    let real = |_: &Gpu| std::env::var_os("XLA_ATTENTION_EMULATOR").is_none();
    let Some(gpu) = Gpu::with_tuned_kernels_or_skip().filter(real) else { return };
    let beside = Gpu::first().unwrap();
    let load = BatchSpec { dtypes: BF16.into(), head_dim: 256, lengths: vec![(900, 900)], ..BatchSpec::default() };
    let load = any_results(&BatchSpec { heads: (6, 6), ..load }).invocation();
    let lengths: [&[(usize, usize)]; 4] = [
        &[(640, 640), (640, 640)],
        &[(700, 400), (130, 904), (1, 300), (500, 500)],
        &[(100, 100); 12],
        &[(2500, 2500)],
    ];
    let masks = [Mask::FULL, Mask::CAUSAL, Mask::sliding(300)];
    for (head_dim, shapes, launches) in [(64, 14, 100), (128, 14, 100), (96, 3, 20), (192, 3, 20), (256, 3, 20)] {
        for index in 0..shapes {
            let (lengths, mask) = (lengths[index % 4].to_vec(), masks[index % 3]);
            let (_, softcap, alibi, key_bounds, bias) = LOGITS[[0, 3, 1, 2, 4][index / 3]];
            let (dtypes, heads) = ([BF16, F16][index % 2].into(), [(8, 8), (8, 2)][index / 2 % 2]);
            let spec = BatchSpec { dtypes, heads, head_dim, lengths, mask, softcap, alibi, ..BatchSpec::default() };
            let case = any_results(&BatchSpec { key_bounds, bias, ..spec });
            for beside in [None, Some((&beside, &load))] {
                case.invocation().assert_same_bits(&gpu, launches, 4, beside);
            }
        }
    }
}

fn any_results(spec: &BatchSpec) -> GradientCase {
    let memory_layout = MemoryLayout { workspace: Some(60_000_001), ..large_workspace() };
    GradientCase::of_any_results(AttentionCase::flash(&spec.batch(), &memory_layout), GradientOptions::ALL)
}

fn run(gpu: &Gpu, spec: &BatchSpec) {
    any_results(spec).invocation().run_on_gpu(gpu, BufferPadding::Redzones, 0).unwrap();
}
