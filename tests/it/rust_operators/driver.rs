//! Makes calls through the safe functions.

use crate::support::{Array, Attr, CallBuffers, GuardedBuffer, Invocation, Side};
use xla_attention::{
    AttentionResults, AttentionState, FlashAttnVarlenBwdInputs, FlashAttnVarlenBwdOptions, FlashAttnVarlenBwdResults,
    FlashAttnVarlenInputs, FlashAttnVarlenOptions, GatherKvCacheInputs, GatherKvCacheOptions, GatherKvCacheResults,
    Host, Kv, KvCacheUpdateInputs, KvCacheUpdateOptions, Memory, MlaPagedAttentionInputs, MlaPagedAttentionOptions,
    MlaPagedAttentionUpdateInputs, On, PagedAttentionInputs, PagedAttentionOptions, PagedAttentionUpdateInputs, Result,
    RopeKvCacheUpdateInputs, RopeKvCacheUpdateOptions, RopeKvCacheUpdateResults, ScaledCache, TensorMut, TensorRef,
    flash_attn_varlen, flash_attn_varlen_bwd, gather_kv_cache, kv_cache_update, merge_attention_states,
    mla_paged_attention, mla_paged_attention_update, paged_attention, paged_attention_update, rope_kv_cache_update,
    simple_add,
};

/// The results of a call that must succeed, on the tested device.
pub(crate) fn results(call: &Invocation) -> Vec<Array> {
    #[cfg(feature = "cuda")]
    if let Some(results) = crate::support::device::on_chosen_gpu(|gpu| gpu::results(call, gpu)) {
        return results;
    }
    on_cpu(call, On::cpu()).unwrap_or_else(|error| panic!("{} {}: {error}", call.target, call.description))
}

/// The results of a call on the CPU, whose buffers touch guard pages.
pub(crate) fn on_cpu(call: &Invocation, on: On<Host>) -> Result<Vec<Array>> {
    let buffers: CallBuffers<GuardedBuffer> = call.guarded(Side::EndsAtGuard);
    // SAFETY: the buffer has this many bytes and lives as long as `buffers`. No result of a function shares memory with
    // an operand.
    let operand = |index: usize, array: &Array| unsafe {
        let bytes = std::slice::from_raw_parts(buffers.operand(index).data(), array.bytes.len());
        TensorRef::from_bytes(bytes, array.dtype, &shape(&array.dims))
    };
    // SAFETY: as for operands; nothing else accesses the buffer.
    let result = |index: usize, array: &Array| unsafe {
        let bytes = std::slice::from_raw_parts_mut(buffers.result(index).data(), array.bytes.len());
        TensorMut::from_bytes(bytes, array.dtype, &shape(&array.dims))
    };
    run(&Tensors { call, operand: &operand, result: &result }, on)?;
    Ok(buffers.results())
}

fn shape(dims: &[i64]) -> Vec<usize> {
    dims.iter().map(|&dim| dim as usize).collect()
}

#[cfg(feature = "cuda")]
mod gpu {
    use super::{Array, Invocation, On, TensorMut, TensorRef, Tensors, run, shape};
    use crate::support::BufferMemory as _;
    use crate::support::device::{BufferPadding, Gpu};
    use xla_attention::Stream;

    /// The results of a call on the GPU, whose buffers lie between redzones.
    pub(super) fn results(call: &Invocation, gpu: &Gpu) -> Vec<Array> {
        let buffers = call.on_gpu(gpu, BufferPadding::Redzones);
        let address = |data: *mut u8, array: &Array| (data as usize, array.bytes.len(), array.dtype);
        // SAFETY: the buffer has this many bytes and is freed after the stream has finished. No result shares memory
        // with an operand.
        let operand = |index: usize, array: &Array| unsafe {
            let (address, bytes, dtype) = address(buffers.operand(index).data(), array);
            TensorRef::from_device(address, bytes, dtype, &shape(&array.dims))
        };
        // SAFETY: as for operands; nothing else accesses the buffer.
        let result = |index: usize, array: &Array| unsafe {
            let (address, bytes, dtype) = address(buffers.result(index).data(), array);
            TensorMut::from_device(address, bytes, dtype, &shape(&array.dims))
        };
        // SAFETY: the stream belongs to this thread's context.
        let on = unsafe { On::stream(Stream(gpu.stream as usize)) };
        run(&Tensors { call, operand: &operand, result: &result }, on).unwrap();
        gpu.finish();
        buffers.results()
    }
}

/// The tensors of a call, made from their index and their array.
struct Tensors<'a, M> {
    call: &'a Invocation,
    operand: &'a dyn Fn(usize, &Array) -> TensorRef<'a, M>,
    result: &'a dyn Fn(usize, &Array) -> TensorMut<'a, M>,
}

/// Converts the part of a call with this name to the type that a function takes.
trait Named<'a, M>: Sized {
    fn of(call: &Tensors<'a, M>, name: &str) -> Self;
}

impl<'a, M> Named<'a, M> for Option<TensorRef<'a, M>> {
    fn of(Tensors { call, operand, .. }: &Tensors<'a, M>, name: &str) -> Self {
        let given = call.operands.iter().position(|(of, array)| *of == name && array.dims != [0]);
        given.map(|index| operand(index, &call.operands[index].1))
    }
}

impl<'a, M> Named<'a, M> for TensorRef<'a, M> {
    /// A required tensor may be empty.
    fn of(Tensors { call, operand, .. }: &Tensors<'a, M>, name: &str) -> Self {
        let index = call.operands.iter().position(|(of, _)| *of == name);
        let index = index.unwrap_or_else(|| panic!("{} has no {name}", call.target));
        operand(index, &call.operands[index].1)
    }
}

impl<'a, M> Named<'a, M> for Option<TensorMut<'a, M>> {
    fn of(Tensors { call, result, .. }: &Tensors<'a, M>, name: &str) -> Self {
        let index = call.results.iter().position(|of| of.name == name && of.dims != [0])?;
        Some(result(index, &Array::filled(call.results[index].dtype, &call.results[index].dims, 0)))
    }
}

impl<'a, M> Named<'a, M> for TensorMut<'a, M> {
    fn of(call: &Tensors<'a, M>, name: &str) -> Self {
        Option::of(call, name).unwrap()
    }
}

/// Attributes. A negative integer means none.
macro_rules! attributes {
    ($($type:ty: $pattern:pat => $value:expr),*) => {
        $(impl<'a, M> Named<'a, M> for $type {
            fn of(of: &Tensors<'a, M>, name: &str) -> Self {
                match of.call.attributes.iter().find(|(of, _)| *of == name).unwrap().1 {
                    $pattern => $value,
                    ref other => panic!("{name} is {other:?}"),
                }
            }
        })*
    };
}
attributes! {
    bool: Attr::Bool(value) => value,
    f32: Attr::F32(value) => value,
    Option<f32>: Attr::F32(value) => Some(value),
    Option<usize>: Attr::I64(value) => usize::try_from(value).ok()
}

/// Fills each field of a structure with the part of the call that has the field's name.
macro_rules! named {
    ($of:ident => $type:ident { $($field:ident),* $(,)? }) => {
        $type { $($field: Named::of($of, stringify!($field))),* }
    };
}

/// K and V in the layout of the attribute `kv_layout`.
fn kv<'a, M, T>(of: &Tensors<'a, M>, first: &str, second: &str) -> Kv<T>
where
    T: Named<'a, M>,
    Option<T>: Named<'a, M>,
{
    let only: T = Named::of(of, first);
    match (Option::<usize>::of(of, "kv_layout"), Option::<T>::of(of, second)) {
        (Some(0), Some(v)) => Kv::Split { k: only, v },
        (Some(1), None) => Kv::Interleaved(only),
        (Some(2), None) => Kv::Stacked(only),
        (Some(3), None) => Kv::PerPage(only),
        (layout, _) => panic!("kv_layout {layout:?} with another number of tensors"),
    }
}

/// Calls the function of the target.
fn run<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    match of.call.target {
        "xla_gpu_simple_add" => simple_add(Named::of(of, "a"), Named::of(of, "b"), Named::of(of, "out"), on),
        "xla_gpu_merge_attention_states" => {
            let state = |out, lse| AttentionState { out: TensorRef::of(of, out), lse: Named::of(of, lse) };
            let merged = named!(of => AttentionState { out, lse });
            merge_attention_states(&state("out_a", "lse_a"), &state("out_b", "lse_b"), merged, on)
        }
        "xla_gpu_kv_cache_update" => update(of, kv(of, "kv_cache", "none"), on),
        "xla_gpu_kv_cache_update_split" => {
            update(of, Kv::Split { k: Named::of(of, "k_cache"), v: Named::of(of, "v_cache") }, on)
        }
        "xla_gpu_gather_kv_cache" => {
            let (block_tables, context_lens) = (Named::of(of, "block_tables"), Named::of(of, "context_lens"));
            let inputs = GatherKvCacheInputs { kv_cache: kv(of, "k_cache", "v_cache"), block_tables, context_lens };
            let options = named!(of => GatherKvCacheOptions { k_scale, v_scale, kv_scale_cache });
            gather_kv_cache(&inputs, &options, named!(of => GatherKvCacheResults { keys, values, cu_seqlens }), on)
        }
        "xla_gpu_rope_kv_cache_update" => {
            let inputs = named!(of => RopeKvCacheUpdateInputs { query, key, value, slot_mapping, positions, cos_sin });
            let options = named!(of => RopeKvCacheUpdateOptions { interleaved, k_scale, v_scale });
            let (kv_cache, query_out) = (kv(of, "kv_cache", "none"), Named::of(of, "query_out"));
            rope_kv_cache_update(&inputs, &options, RopeKvCacheUpdateResults { kv_cache, query_out }, on)
        }
        "xla_gpu_paged_attention" => paged(of, on),
        "xla_gpu_paged_attention_update" => paged_update(of, on),
        "xla_gpu_mla_paged_attention" => latent(of, on),
        "xla_gpu_mla_paged_attention_update" => latent_update(of, on),
        "xla_gpu_flash_attn_varlen" => flash(of, on),
        "xla_gpu_flash_attn_varlen_bwd" => flash_bwd(of, on),
        other => panic!("{other} has no function"),
    }
}

fn update<M: Memory>(of: &Tensors<M>, cache: Kv<TensorMut<M>>, on: On<M>) -> Result {
    let inputs = named!(of => KvCacheUpdateInputs { key, value, slot_mapping });
    let cache = ScaledCache { kv_cache: cache, kv_scale_cache: scale_cache(of) };
    kv_cache_update(&inputs, &named!(of => KvCacheUpdateOptions { k_scale, v_scale }), cache, on)
}

/// The scales of a cache that is updated.
fn scale_cache<'a, M>(of: &Tensors<'a, M>) -> Option<TensorMut<'a, M>> {
    Named::of(of, "kv_scale_cache")
}

fn attention_results<'a, M>(of: &Tensors<'a, M>) -> AttentionResults<'a, M> {
    named!(of => AttentionResults { out, softmax_lse, workspace })
}

fn paged_options<'a, M: Memory>(of: &Tensors<'a, M>) -> PagedAttentionOptions<'a, M> {
    named!(of => PagedAttentionOptions {
        scale, sliding_window, soft_cap, alibi_slopes, sinks, q_scale, k_scale, v_scale, k_start, k_end, tree_mask,
        kv_scale_cache, batch_invariant,
    })
}

fn paged<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let inputs = named!(of => PagedAttentionInputs {
        query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs,
    });
    paged_attention(&inputs, &paged_options(of), attention_results(of), on)
}

fn paged_update<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let inputs = named!(of => PagedAttentionUpdateInputs {
        query, context_lens, block_tables, query_start_loc, num_seqs, key, value, slot_mapping,
    });
    let cache = ScaledCache { kv_cache: TensorMut::of(of, "kv_cache"), kv_scale_cache: scale_cache(of) };
    let options = PagedAttentionOptions { kv_scale_cache: None, ..paged_options(of) };
    paged_attention_update(&inputs, &options, cache, attention_results(of), on)
}

fn latent_options<'a, M: Memory>(of: &Tensors<'a, M>) -> MlaPagedAttentionOptions<'a, M> {
    named!(of => MlaPagedAttentionOptions {
        num_seqs, sinks, kv_scale, softcap, causal, window_left, window_right, max_seqlen_q, max_seqlen_k, batch_invariant,
    })
}

fn latent<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let inputs = named!(of => MlaPagedAttentionInputs {
        q, kv_cache, cu_seqlens_q, seqused_k, block_table, softmax_scale,
    });
    mla_paged_attention(&inputs, &latent_options(of), attention_results(of), on)
}

fn latent_update<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let inputs = named!(of => MlaPagedAttentionUpdateInputs {
        q, cu_seqlens_q, seqused_k, block_table, c_kv, k_pe, slot_mapping, softmax_scale,
    });
    mla_paged_attention_update(&inputs, &latent_options(of), Named::of(of, "kv_cache"), attention_results(of), on)
}

fn flash<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let (q, kv, cu_seqlens_q) = (Named::of(of, "q"), kv(of, "k", "v"), Named::of(of, "cu_seqlens_q"));
    let options = named!(of => FlashAttnVarlenOptions {
        cu_seqlens_k, seqused_k, block_table, seqused_q, leftpad_k, alibi_slopes, sinks, q_scale, k_scale, v_scale, q_offset,
        k_start, k_end, bias, softmax_scale, softcap, causal, window_left, window_right, top_left, max_seqlen_q, max_seqlen_k, batch_invariant,
    });
    flash_attn_varlen(&FlashAttnVarlenInputs { q, kv, cu_seqlens_q }, &options, attention_results(of), on)
}

fn flash_bwd<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let inputs = named!(of => FlashAttnVarlenBwdInputs { dout, q, k, v, out, softmax_lse, cu_seqlens_q });
    let options = named!(of => FlashAttnVarlenBwdOptions {
        cu_seqlens_k, seqused_k, seqused_q, leftpad_k, alibi_slopes, sinks, dlse, q_offset, k_start, k_end, bias, softmax_scale, softcap,
        causal,
        window_left, window_right, top_left, max_seqlen_q, max_seqlen_k, deterministic,
    });
    let results = named!(of => FlashAttnVarlenBwdResults { dq, dk, dv, dsinks, workspace, dbias });
    flash_attn_varlen_bwd(&inputs, &options, results, on)
}
