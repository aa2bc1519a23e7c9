//! Calls with a bias of pairs of rows and keys: few queries by decode, whose keys are divided between CTAs; others on Hopper by a
//! variant of prefill, elsewhere and for what that does not take by a portable kernel. No other kernel knows of it.

use super::hopper::HopperPrefill;
use super::hopper_split_kv::has_many_keys;
use super::loaded_bias::loaded_bias;
use super::params::check_dense;
use super::split_times::Times;
use super::tiles::AttentionTile;
use super::{Call, Launch, Launches, Parameter, UNLIMITED, decode, longest_or_mean_queries};
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::attention::AttentionParams;
use crate::cuda::params::bias::BiasSource;
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::{Attention, Bias, KeyStorage};

const KERNEL: &str = "attention_bias";

/// Queries of the longest sequence, or of the average one, and keys of the average one, from which on Hopper's kernel takes a
/// call: it does not pack the query heads of a KV head. On an H200 16 sequences of 64 queries take 0.71 to 1.08 times the portable
/// kernel's speed over 64 keys, and 1.12 to 1.79 times over 2048.
const HOPPER_QUERIES: i64 = 64;
const HOPPER_KEYS: usize = 128;

impl BiasSource {
    /// Of a call whose q has elements of `q_bytes`.
    pub(in crate::cuda) fn new(bias: &Bias, q_bytes: usize) -> Result<Self> {
        check_dense("bias", bias.data, bias.dtype.size())?;
        let rows = bias.seqs.saturating_mul(bias.heads).saturating_mul(bias.rows);
        if rows >= u32::MAX as usize {
            return Err(Error::unimplemented(format!("bias has {rows} rows; on GPUs it has fewer than 2^32 - 1")));
        }
        Ok(Self {
            data: bias.data.cast(),
            seq_matrices: if bias.seqs == 1 { 0 } else { bias.heads as i32 },
            head_matrices: i32::from(bias.heads != 1),
            rows: bias.rows as i32,
            keys: bias.keys as i32,
            is_wide: i32::from(bias.dtype.size() > q_bytes),
            reserved: 0,
        })
    }
}

impl AttentionTile {
    /// Shared memory of a launch: beside the tile's, two numbers for each row and, unless the bias is read where it is, one for
    /// each warp and of each row the bias of a block of keys and one more chunk (`kernels/include/bias_tile.cuh`).
    fn bytes_with_bias(&self, bias_bytes: u32) -> u32 {
        let rows = self.rows() as u32;
        let tables = self.shared_bytes + rows * 2 * size_of::<u32>() as u32;
        let staged = |element: u32| tables + 16 + rows * (self.keys * element + 16);
        if staged(self.bytes) > 99 * 1024 { tables } else { staged(bias_bytes) }
    }
}

/// Takes every call with a bias: one launch for the sequences of all lengths, by decode, or with a CTA per tile and KV head.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let problem = call.problem;
    let Some(bias) = &problem.score.bias else { return Ok(None) };
    let prefill = hopper(call);
    if let Some(launches) = few_queries(call, prefill)? {
        return Ok(Some(launches));
    }
    if let Some(prefill) = prefill {
        let mut launches = prefill.launch_for_all(call)?;
        let copy = loaded_bias(problem).map(|bias| bias.copy_launch(Parameter::CopyRows)).transpose()?;
        launches.list.splice(0..0, copy.flatten());
        return Ok(Some(launches));
    }
    let bias_bytes = bias.dtype.size() as u32;
    let (variant, tile) = kernel_for(problem, bias_bytes, &call.device)?;
    let tiles = call.max_tiles(tile.rows(), call.seqs().min(call.rows())).max(1);
    let ctas = tiles.saturating_mul(problem.num_kv_heads as i64);
    if ctas > i64::from(i32::MAX) {
        return Err(Error::unimplemented(format!("the call takes up to {ctas} blocks; a grid has up to 2^31 - 1")));
    }
    let shared_memory = tile.bytes_with_bias(bias_bytes);
    let config = LaunchConfig { grid: [ctas as u32, 1, 1], threads: tile.threads(), shared_memory };
    let attention = AttentionParams { clears_padding_rows: 1, ..call.params_for(1, UNLIMITED) };
    let list = vec![Launch::new(KERNEL, variant, config, call.parameter(&attention))];
    Ok(Some(Launches { list, store_new_tokens: false }))
}

/// Decode, if it takes less time than prefill, which is `hopper` or portable. What is chosen depends on the batch, so none with
/// `batch_invariant`.
fn few_queries<'c>(call: &Call<'c>, hopper: Option<HopperPrefill>) -> Result<Option<Launches<'c>>> {
    if call.problem.batch_invariant {
        return Ok(None);
    }
    if let Some(launches) = decode::launches(call)? {
        return Ok(Some(launches));
    }
    if !has_many_keys(call.problem) {
        return Ok(None);
    }
    let times = Times::of(call, hopper)?;
    if times.decode <= times.most { decode::launches_with_split_keys(call) } else { Ok(None) }
}

/// Hopper's kernel for the call. What is chosen depends on the batch, so none with `batch_invariant`.
fn hopper(call: &Call) -> Option<HopperPrefill> {
    let problem = call.problem;
    let KeyStorage::Contiguous { total } = problem.keys.storage else { return None };
    let is_long =
        longest_or_mean_queries(problem) >= HOPPER_QUERIES && total >= HOPPER_KEYS.saturating_mul(problem.max_seqs);
    let takes = !problem.batch_invariant && is_long;
    takes.then(|| call.hopper_prefill()).flatten()
}

/// The variant of the smallest sufficient head dimension with which the bias fits the device, and its tile.
fn kernel_for(problem: &Attention, bias_bytes: u32, device: &Device) -> Result<(usize, &'static AttentionTile)> {
    let dtype = variants::dtype_value(problem.kv_dtype);
    let built = AttentionTile::serving(problem, "prefill")
        .filter(|tile| tile.bytes_with_bias(bias_bytes) <= device.shared_memory)
        .filter_map(|tile| Some((variants::find(KERNEL, &[dtype, tile.head_dim_value]).ok()?, tile)));
    built.min_by_key(|(_, tile)| tile.head_dim).ok_or_else(|| {
        let head_dim = problem.head_dim.max(problem.value_dim);
        Error::unimplemented(format!("no kernel {KERNEL} is built for {dtype} and head dimension {head_dim}"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::hopper::tests::ragged;
    use super::super::hopper_split_kv::tests::few_queries;
    use super::super::tests::{device, named_on, problem};
    use super::*;
    use crate::problem::Op;
    use crate::problem::attention::{Keys, Score};
    use crate::problem::workspace::{AttentionSizes, BiasSizes};
    use crate::tensor::{DType, Tensor};
    use std::ptr::{null, null_mut};

    /// Those of [`ragged`].
    const SIZES: AttentionSizes = AttentionSizes {
        num_q_heads: 12,
        num_kv_heads: 2,
        head_dim: 128,
        value_dim: 128,
        dtype: DType::BF16,
        batch_invariant: false,
    };

    const OWN: BiasSizes = BiasSizes {
        keys: 77,
        dtype: DType::BF16,
        is_shared: false,
        is_masked: false,
        has_gradient: false,
        rows: 0,
        bias_rows: 0,
    };

    /// The problem with a bias that all heads share.
    fn biased(problem: &Attention<'static>, dtype: DType) -> Attention<'static> {
        let bias = Bias { data: null(), dtype, seqs: 1, heads: 1, rows: 64, keys: 77 };
        Attention { score: Score { bias: Some(bias), ..problem.score }, ..*problem }
    }

    #[test]
    fn one_launch_takes_all_sequences_of_a_call_with_a_bias() {
        let (prefill, decode) = ("attention_bias_bf16_128", "attention_bias_decode_bf16_128");
        for (rows, seqs, dtype, batch_invariant, kernel) in [
            (1, 1, DType::BF16, false, decode),
            (64, 64, DType::F32, false, decode),
            (256, 256, DType::F32, false, decode),
            (64, 64, DType::F32, true, prefill),
            (5000, 7, DType::BF16, false, prefill),
        ] {
            let call = Attention { batch_invariant, ..biased(&problem(rows, seqs, 8, 96), dtype) };
            for capability in [80, 90, 120] {
                let device = Device { capability, ..device(true) };
                assert_eq!(named_on(&call, &device), [(kernel, 1, i32::MAX)]);
            }
        }
        assert!(named_on(&problem(64, 64, 8, 96), &device(true)).iter().all(|(name, ..)| !name.contains("bias")));
    }

    #[test]
    fn few_queries_over_many_keys_are_decoded() {
        let named = |seqs: usize, queries: usize, keys: usize, dtype: DType| {
            let plain = few_queries(seqs, queries, [32, 8]);
            let keys = Keys { storage: KeyStorage::Contiguous { total: seqs * keys }, ..plain.keys };
            let bias = Bias { data: null(), dtype, seqs, heads: 1, rows: queries, keys: 4096 };
            let call = Attention { keys, score: Score { bias: Some(bias), ..plain.score }, ..plain };
            named_on(&call, &device(true))[0].0
        };
        let decode = "attention_bias_decode_bf16_128";
        for dtype in [DType::BF16, DType::F32] {
            assert_eq!(named(1, 8, 4096, dtype), decode);
            assert_eq!(named(32, 5, 4096, dtype), decode);
            assert_eq!(named(4, 32, 4096, dtype), decode);
            assert_eq!(named(4, 32, 128, dtype), "attention_bias_bf16_128");
        }
        assert_eq!(named(4, 512, 4096, DType::BF16), "hopper_bias_bf16_128");
    }

    #[test]
    fn hopper_takes_long_sequences_with_a_bias() {
        let named = |change: &dyn Fn(&mut Attention, &mut Bias)| {
            let mut call = biased(&ragged(), DType::BF16);
            let mut bias = Bias { keys: 80, ..call.score.bias.expect("it has one") };
            change(&mut call, &mut bias);
            call.score.bias = Some(bias);
            named_on(&call, &device(true))[0].0
        };
        assert_eq!(named(&|_, _| ()), "hopper_bias_bf16_128");
        assert_eq!(named(&|_, bias| bias.keys = 84), "hopper_bias_bf16_128_shifted");
        assert_eq!(named(&|_, bias| bias.dtype = DType::F32), "hopper_bias_bf16_128_f32_bias");
        let portable = "attention_bias_bf16_128";
        assert_eq!(named(&|call, _| call.score.softcap = 1.0), portable);
        assert_eq!(named(&|call, _| call.max_seqs = 16), portable);
        assert_eq!(named(&|call, _| call.keys.storage = KeyStorage::Contiguous { total: 895 }), portable);
        assert_eq!(named(&|call, _| call.batch_invariant = true), portable);
    }

    #[test]
    fn hopper_copies_a_shared_bias_whose_rows_tma_does_not_load_where_the_workspace_has_room() {
        let named = |start: usize, bytes: i64, keys: usize, dtype: DType| {
            let dims = [bytes];
            let workspace = Tensor::dense(DType::U8, start as *mut u8, &dims);
            let bias = Bias { keys, ..biased(&ragged(), dtype).score.bias.expect("it has one") };
            let call = Attention { score: Score { bias: Some(bias), ..ragged().score }, ..ragged() };
            let launches = named_on(&Attention { workspace: Some(workspace), ..call }, &device(true));
            launches.iter().map(|(name, ..)| *name).collect::<Vec<_>>()
        };
        let copied = ["copy_bias_rows", "hopper_bias_bf16_128"];
        let size = |keys: usize, is_shared, is_masked| {
            let bias = BiasSizes { keys: keys as i64, is_shared, is_masked, ..OWN };
            SIZES.bias_workspace(Op::FlashAttnVarlen, bias)
        };
        for (start, keys) in [0x1000, 0x1001, 0x107f].into_iter().flat_map(|start| [(start, 77), (start, 84)]) {
            let size = size(keys, true, false);
            let bytes = size.fixed + 64 * size.per_bias_row;
            assert_eq!(named(start, bytes, keys, DType::BF16), copied);
            assert_eq!(named(start, bytes - 256, keys, DType::BF16), ["hopper_bias_bf16_128_shifted"]);
            assert_eq!(named(start, 2 * bytes, keys, DType::F32), ["hopper_bias_bf16_128_f32_bias"]);
        }
        assert_eq!(named(0x1000, 1 << 20, 80, DType::BF16), copied[1..]);
        assert_eq!(named(0x1000, 1 << 20, 0, DType::BF16), ["hopper_bias_bf16_128_shifted"]);
        assert_eq!(size(80, true, false).per_bias_row, 0);
    }

    #[test]
    fn a_bias_of_each_pairs_own_is_copied_past_128_columns_and_read_where_it_is_up_to_that() {
        let cases = [64, 128, 256].into_iter().flat_map(|dim| [(dim, -1, 7), (dim, 0, 7), (dim, -1, 1), (dim, 0, 1)]);
        for (dim, window_right, seqs) in cases {
            let workspace = Some(Tensor::dense(DType::U8, null_mut(), &[9_000_000]));
            let plain = ragged();
            let bias = Some(Bias { seqs, heads: 12, ..biased(&plain, DType::BF16).score.bias.expect("it has one") });
            let score = Score { window_right, bias, ..plain.score };
            let call = Attention { workspace, score, head_dim: dim, value_dim: dim, ..plain };
            let launches = named_on(&call, &device(true)).iter().map(|(name, ..)| *name).collect::<Vec<_>>();
            let is_copied = dim > 128 || seqs == 1;
            let kernel = format!("hopper_bias_bf16_{dim}{}", if is_copied { "" } else { "_shifted" });
            assert_eq!(launches, if is_copied { vec!["copy_bias_rows", &kernel] } else { vec![kernel.as_str()] });
            let sizes = AttentionSizes { head_dim: dim as i64, value_dim: dim as i64, ..SIZES };
            let bias = BiasSizes { is_shared: seqs == 1, is_masked: window_right >= 0, ..OWN };
            assert_eq!(is_copied, sizes.bias_workspace(Op::FlashAttnVarlen, bias).per_bias_row > 0);
        }
    }

    #[test]
    fn every_dtype_and_head_dimension_finds_a_kernel() {
        let plain = problem(64, 1, 8, 64);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (dim, kilobytes) in (8..=512).step_by(8).flat_map(|dim| [99, 163, 227].map(|of| (dim, of))) {
                let device = Device { shared_memory: kilobytes * 1024, ..device(true) };
                for bias_bytes in [dtype.size() as u32, 4] {
                    let q = Tensor { dtype, ..plain.q };
                    let problem = Attention { q, kv_dtype: dtype, head_dim: 8, value_dim: dim, ..plain };
                    let (variant, tile) = kernel_for(&problem, bias_bytes, &device).expect("there is a kernel");
                    assert!(tile.head_dim as usize >= dim && variants::VARIANTS[variant].target == "80", "{tile:?}");
                    assert!(tile.bytes_with_bias(bias_bytes) <= device.shared_memory, "{tile:?}");
                    let is_next = tile.head_dim == 256 && dim > 64;
                    assert!(dim > 128 || !is_next || (bias_bytes > tile.bytes && kilobytes == 99), "{tile:?}");
                }
            }
        }
    }

    #[test]
    fn a_bias_that_is_not_aligned_or_has_too_many_rows_is_refused() {
        let aligned = biased(&problem(64, 1, 8, 64), DType::F32).score.bias.expect("it has one");
        let shifted = Bias { data: std::ptr::without_provenance(8), ..aligned };
        let long = Bias { seqs: 1 << 16, heads: 1 << 8, rows: 1 << 8, ..aligned };
        assert!(BiasSource::new(&aligned, 2).is_ok_and(|source| source.is_wide == 1 && source.head_matrices == 0));
        assert!(BiasSource::new(&shifted, 2).is_err_and(|e| e.message.contains("multiples of 16 bytes")));
        assert!(BiasSource::new(&long, 2).is_err_and(|e| e.message.contains("4294967296 rows")));
    }
}
