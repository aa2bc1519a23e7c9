//! Which of Hopper's prefill kernels is launched.

use super::{
    AttentionCase, BF16, BatchSpec, Dtypes, F16, F32, F32_HEAD_DIMS, FP8_HEAD_DIMS, HEAD_DIMS, KvLayout, Mask,
    MemoryLayout, between_tiles, has_tile, head_dims_between_tiles,
};
use crate::support::device::{BufferPadding, Gpu};
use crate::support::{Alibi, on_emulator};

/// Short, with a call of every variant: the slower tools of compute-sanitizer run it (tests/gpu/run.py).
#[test]
fn tuned_kernels_are_chosen() {
    let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
    let transforms = [(0.0, Alibi::Off, "none"), (2.5, Alibi::Off, "softcap"), (2.5, Alibi::PerHead, "softcap_alibi")];
    let fp8_transforms = [(0.0, Alibi::Off, "scaled"), (2.5, Alibi::Off, "softcap_alibi")];
    for (dtypes, name, head_dims, transforms) in [
        (Dtypes::same(BF16), "bf16", &HEAD_DIMS[..], &transforms[..]),
        (Dtypes::same(F16), "f16", &HEAD_DIMS[..], &transforms[..]),
        (Dtypes::narrow(BF16), "fp8", &FP8_HEAD_DIMS[..], &fp8_transforms[..]),
        (Dtypes::narrow(F16), "fp8", &FP8_HEAD_DIMS[..], &fp8_transforms[..]),
        (Dtypes::same(F32), "f32", &F32_HEAD_DIMS[..], &transforms[..]),
    ] {
        let dims = head_dims
            .iter()
            .map(|&(d, dv)| (d, dv, Mask::FULL, if d == dv { format!("{d}") } else { format!("{d}x{dv}") }));
        let short = match name {
            "fp8" => {
                vec![(64, 64, Mask::CAUSAL, "64_short".to_owned()), (128, 128, Mask::FULL, "128_short".to_owned())]
            }
            "f32" => vec![],
            _ => vec![(64, 64, Mask::CAUSAL, "64_short".to_owned())],
        };
        for (head_dim, value_dim, mask, dims) in dims.chain(short) {
            let layout = if head_dim == value_dim { KvLayout::Stacked } else { KvLayout::Split };
            for &(softcap, alibi, logits) in transforms {
                // These variants do not exist.
                if dims.ends_with("short") && softcap > 0.0 {
                    continue;
                }
                if logits == "softcap" && (name == "f32" || dims != "128") {
                    continue;
                }
                // Packed keys that are few make tiny tiles of short sequences, in fp8 short ones.
                let has_many_keys = dims == if name == "fp8" { "128" } else { "64_short" };
                let keys = if has_many_keys { 2500 } else { 1000 };
                // More work tiles than SMs, each with several blocks of keys.
                let spec = BatchSpec {
                    dtypes,
                    head_dim,
                    value_dim: Some(value_dim),
                    softcap,
                    alibi,
                    heads: (Gpu::sms().div_ceil(4), 1),
                    lengths: vec![(900, keys)],
                    mask,
                    ..BatchSpec::default()
                };
                for (memory_layout, keys) in
                    [(MemoryLayout::contiguous(), "contiguous"), (MemoryLayout::paged(layout, 16), "paged")]
                {
                    if name == "fp8" && dims.ends_with("short") && keys == "paged" {
                        continue;
                    }
                    // One f32 kernel loads all layouts of keys.
                    let keys = if name == "f32" { String::new() } else { format!("_{keys}") };
                    AttentionCase::flash(&spec.batch(), &memory_layout)
                        .invocation()
                        .assert_logs(&gpu, &[&format!("hopper_prefill_{name}_{dims}{keys}_{logits} with")]);
                }
            }
        }
    }
}

/// More pairs of work tiles than clusters, each with several blocks of keys.
#[test]
fn long_sequences_without_a_mask_take_clusters() {
    let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
    let sms = Gpu::sms();
    for (dtype, name) in [(BF16, "bf16"), (F16, "f16")] {
        for head_dim in [192, 256] {
            // Causal calls of many more keys than queries take them too.
            for (mask, heads, lengths) in
                [(Mask::FULL, sms.div_ceil(4), (1024, 700)), (Mask::CAUSAL, sms / 2 + 1, (256, 1100))]
            {
                let spec = BatchSpec {
                    dtypes: dtype.into(),
                    head_dim,
                    heads: (heads, 1),
                    lengths: vec![lengths],
                    mask,
                    ..BatchSpec::default()
                };
                AttentionCase::flash(&spec.batch(), &MemoryLayout::contiguous().bare())
                    .invocation()
                    .assert_logs(&gpu, &[&format!("hopper_prefill_{name}_{head_dim}_cluster_contiguous_none with")]);
            }
        }
    }
}

#[test]
fn short_sequences_take_tiny_tiles() {
    let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
    for (dtype, name) in [(BF16, "bf16"), (F16, "f16")] {
        for (head_dim, bucket) in [(64, "64_tiny"), (96, "96_tiny"), (128, "128_tiny"), (192, "192_tiny")] {
            let spec = BatchSpec {
                dtypes: dtype.into(),
                // More work tiles than CTAs.
                heads: (Gpu::sms(), Gpu::sms()),
                head_dim,
                lengths: vec![(20, 30), (90, 90), (64, 64)],
                mask: Mask::CAUSAL,
                ..BatchSpec::default()
            };
            for (storage, layout) in
                [("contiguous", MemoryLayout::contiguous()), ("paged", MemoryLayout::paged(KvLayout::Split, 16))]
            {
                AttentionCase::flash(&spec.batch(), &layout)
                    .invocation()
                    .assert_logs(&gpu, &[&format!("hopper_prefill_{name}_{bucket}_{storage}_none with")]);
            }
        }
    }
}

/// Heads are followed by NaN, also within a swizzle atom. On the emulator each call has one of the layouts.
#[test]
fn boxes_end_with_the_columns_of_a_head() {
    let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
    let layouts =
        [MemoryLayout::contiguous(), MemoryLayout::paged(KvLayout::Split, 16), MemoryLayout::paged(KvLayout::Split, 4)];
    for (index, dims) in head_dims_between_tiles().enumerate() {
        let spec = between_tiles(index, dims);
        if !has_tile(&spec) {
            continue;
        }
        let batch = spec.batch();
        for memory_layout in if on_emulator() { &layouts[index % 3..=index % 3] } else { &layouts[..] } {
            let call = AttentionCase::flash(&batch, memory_layout).invocation();
            let dense = call.run_on_gpu(&gpu, BufferPadding::Redzones, 0).unwrap();
            let gap = |name: &str| if ["q", "k", "v"].contains(&name) { 8 } else { 0 };
            let strided = call.run_strided_on_gpu(&gpu, gap).unwrap();
            assert_eq!(strided[..2], dense[..2], "D {}, Dv {}, {memory_layout:?}", dims.0, dims.1);
        }
    }
}

#[test]
fn the_fused_kernel_is_chosen() {
    let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
    for (dtype, name) in [(BF16, "bf16"), (F16, "f16")] {
        let lengths = vec![(900, 1000), (1, 3000), (1, 200)];
        let spec = BatchSpec {
            dtypes: dtype.into(),
            heads: (8, 2),
            head_dim: 128,
            lengths,
            mask: Mask::CAUSAL,
            ..BatchSpec::default()
        };
        let memory_layout = MemoryLayout { workspace: Some(9_000_001), ..MemoryLayout::default() };
        AttentionCase::paged(&spec.batch(), &memory_layout)
            .invocation()
            .assert_logs(&gpu, &[&format!("hopper_fused_{name}_128 with")]);
    }
}
