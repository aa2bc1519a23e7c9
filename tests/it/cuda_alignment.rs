//! What only a GPU can show: rows that are aligned to their elements alone, which go element by element, or are refused.

use crate::support::array::{ATTENTION_DTYPES, Dtype, F8E4M3FN, F8E5M2, F32};
use crate::support::batch::Shape;
use crate::support::cache_updates::{SPLIT, Update};
use crate::support::device::{Around, Gpu, Memory};
use crate::support::rotations::Rope;
use crate::support::states::{ANY_LSE, State};
use crate::support::steps::Step;
use crate::support::storage::Storage;
use xla_attention::{Action, Attribute, Call, DType, Op, Stream, Tensor, call};

fn gpu() -> Option<Gpu> {
    let gpu = Gpu::first();
    if gpu.is_none() {
        println!("skipped: this machine has no GPU");
    }
    gpu
}

const CACHE_TYPES: [Option<Dtype>; 3] = [None, Some(F8E4M3FN), Some(F8E5M2)];

#[test]
fn cache_rows_are_written_wherever_they_lie() {
    let Some(gpu) = gpu() else { return };
    for layout in [SPLIT, 1, 2, 3] {
        for dtype in ATTENTION_DTYPES {
            for fp8 in CACHE_TYPES {
                for k_scale in [None, Some(vec![3.0, 0.37])] {
                    let update =
                        Update { layout, dtype, fp8, k_scale, head_dim: 24, value_dim: 24, ..Update::default() };
                    let found = update.invocation(true).run_on_gpu(&gpu, Around::Askew, 0).unwrap();
                    assert!(found == update.expected(), "{update:?}");
                }
            }
        }
    }
}

#[test]
fn rows_turn_wherever_they_lie() {
    let Some(gpu) = gpu() else { return };
    for dtype in ATTENTION_DTYPES {
        for fp8 in CACHE_TYPES {
            for interleaved in [false, true] {
                let update = Update { dtype, fp8, head_dim: 24, value_dim: 24, ..Update::default() };
                let rope = Rope { update, interleaved, ..Rope::default() };
                let found = rope.invocation(true).run_on_gpu(&gpu, Around::Askew, 0).unwrap();
                assert!(found == rope.expected(), "{rope:?}");
            }
        }
    }
}

#[test]
fn states_merge_wherever_they_lie() {
    let Some(gpu) = gpu() else { return };
    for dtype in ATTENTION_DTYPES {
        let part = |seed| State::random(dtype, (5, 3, 64), &ANY_LSE, seed);
        let (a, b) = (part(1), part(2));
        State::of(&a.merge(&b).run_on_gpu(&gpu, Around::Askew, 0).unwrap()).assert_merged_from(&a, &b);
    }
}

#[test]
fn a_query_that_attention_cannot_read_is_refused_before_the_cache_is_written() {
    let Some(gpu) = gpu() else { return };
    let step = Step::new(&Shape::default().batch(), &Storage { workspace: None, ..Storage::default() });
    let invocation = step.invocation(true);
    let place =
        |name: &str, array| Memory::place(&gpu, array, if name == "query" { Around::Askew } else { Around::Redzones });
    let operands: Vec<Memory> = invocation.operands.iter().map(|(name, array)| place(name, array.clone())).collect();
    let out = place("out", step.case.q.clone());
    let view = |memory: &Memory, dims| Tensor::dense(DType(F32.0), memory.address() as *mut u8, dims);
    let tensors: Vec<Tensor> = operands
        .iter()
        .zip(&invocation.operands)
        .map(|(memory, (_, array))| Tensor { dtype: DType(array.dtype.0), ..view(memory, &array.dims) })
        .collect();
    let request = Call {
        op: Op::PagedAttentionUpdate,
        action: Action::LaunchCuda(Stream(gpu.stream as usize)),
        operands: &tensors,
        results: &[view(&out, &step.case.q.dims), tensors[1]],
        attributes: &[Attribute::Bool(false), Attribute::F32(0.1), Attribute::I64(-1), Attribute::F32(0.0)],
    };
    // SAFETY: the tensors are the allocations above, which outlive `finish`.
    let refusal = unsafe { call(&request) }.unwrap_err();
    gpu.finish();
    assert!(refusal.message.ends_with("expected multiples of 16 bytes for both"), "{}", refusal.message);
    assert!(operands[1].read("kv_cache") == step.before);
}
