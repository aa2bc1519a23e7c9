//! Makes the calls of the other tests through the safe functions.

use crate::support::array::Array;
use crate::support::guard::{Guarded, Side};
use crate::support::invocation::{Attr, Invocation, POISON};
use xla_attention::{
    AttentionResults, AttentionState, DType, FlashAttnVarlenBwdInputs, FlashAttnVarlenBwdOptions,
    FlashAttnVarlenBwdResults, FlashAttnVarlenInputs, FlashAttnVarlenOptions, GatherKvCacheInputs,
    GatherKvCacheOptions, GatherKvCacheResults, Host, Kv, KvCacheUpdateInputs, KvCacheUpdateOptions, Memory, On,
    PagedAttentionInputs, PagedAttentionOptions, PagedAttentionUpdateInputs, Result, RopeKvCacheUpdateInputs,
    RopeKvCacheUpdateOptions, RopeKvCacheUpdateResults, TensorMut, TensorRef, flash_attn_varlen, flash_attn_varlen_bwd,
    gather_kv_cache, kv_cache_update, merge_attention_states, paged_attention, paged_attention_update,
    rope_kv_cache_update, simple_add,
};

/// The results of a call that has to succeed, where the environment wants it run.
pub(crate) fn results(call: &Invocation) -> Vec<Array> {
    #[cfg(feature = "cuda")]
    if let Some(found) = crate::support::device::on_chosen_gpu(|gpu| gpu::results(call, gpu)) {
        return found;
    }
    on_cpu(call, On::cpu()).unwrap_or_else(|error| panic!("{} {}: {error}", call.target, call.what))
}

/// The results of a call on the CPU, every buffer against a guard page.
pub(crate) fn on_cpu(call: &Invocation, on: On<Host>) -> Result<Vec<Array>> {
    let place = |name: &str, array: &Array| Guarded::new(name, Side::EndsAtGuard, &array.bytes);
    let operands: Vec<Guarded> = call.operands.iter().map(|(name, array)| place(name, array)).collect();
    let own: Vec<Guarded> = empty_results(call).iter().map(|array| place("result", array)).collect();
    let memory = |index: usize| call.results[index].alias.map_or(&own[index], |operand| &operands[operand]);
    let operand = |index: usize| {
        let (data, (_, array)) = (operands[index].data(), &call.operands[index]);
        // SAFETY: so many bytes, which live as long as the buffers; those of a result are no operand of a function.
        let bytes = unsafe { std::slice::from_raw_parts(data, array.bytes.len()) };
        TensorRef::from_bytes(bytes, DType(array.dtype.0), &shape(&array.dims))
    };
    let result = |index: usize| {
        let (data, result) = (memory(index).data(), &call.results[index]);
        // SAFETY: as above; nobody else uses them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(data, memory(index).bytes().len()) };
        TensorMut::from_bytes(bytes, DType(result.dtype.0), &shape(&result.dims))
    };
    run(&Tensors { call, operand: &operand, result: &result }, on)?;
    operands.iter().chain(&own).for_each(Guarded::assert_slack_untouched);
    let found = empty_results(call).into_iter().enumerate();
    Ok(found.map(|(index, array)| Array { bytes: memory(index).bytes(), ..array }).collect())
}

/// The results before the call, full of NaN, as if each had memory of its own.
fn empty_results(call: &Invocation) -> Vec<Array> {
    call.results.iter().map(|result| Array::filled(result.dtype, &result.dims, POISON)).collect()
}

fn shape(dims: &[i64]) -> Vec<usize> {
    dims.iter().map(|&dim| dim as usize).collect()
}

#[cfg(feature = "cuda")]
mod gpu {
    use super::{DType, Invocation, On, TensorMut, TensorRef, Tensors, empty_results, run, shape};
    use crate::support::array::Array;
    use crate::support::device::{Around, Gpu, Memory};
    use xla_attention::Stream;

    /// The results of a call on the GPU, every buffer between redzones.
    pub(super) fn results(call: &Invocation, gpu: &Gpu) -> Vec<Array> {
        let place = |array: &Array| Memory::place(gpu, array.clone(), Around::Redzones);
        let operands: Vec<Memory> = call.operands.iter().map(|(_, array)| place(array)).collect();
        let own: Vec<Memory> = empty_results(call).iter().map(place).collect();
        let memory = |index: usize| call.results[index].alias.map_or(&own[index], |operand| &operands[operand]);
        // SAFETY: so many bytes each, which are freed after `finish`; those of a result are no operand of a function.
        let operand = |index: usize| unsafe {
            let array = &operands[index].array;
            let dtype = DType(array.dtype.0);
            TensorRef::from_device(operands[index].address(), array.bytes.len(), dtype, &shape(&array.dims))
        };
        // SAFETY: as above; nobody else uses them.
        let result = |index: usize| unsafe {
            let array = &memory(index).array;
            let dtype = DType(array.dtype.0);
            TensorMut::from_device(memory(index).address(), array.bytes.len(), dtype, &shape(&array.dims))
        };
        // SAFETY: a stream of this thread's context.
        let on = unsafe { On::stream(Stream(gpu.stream as usize)) };
        run(&Tensors { call, operand: &operand, result: &result }, on).unwrap();
        gpu.finish();
        (0..own.len()).map(|index| memory(index).read(call.results[index].name)).collect()
    }
}

/// The tensors of a call, by their place in it.
struct Tensors<'a, M> {
    call: &'a Invocation,
    operand: &'a dyn Fn(usize) -> TensorRef<'a, M>,
    result: &'a dyn Fn(usize) -> TensorMut<'a, M>,
}

impl<'a, M> Tensors<'a, M> {
    /// An operand, unless it was left out.
    fn optional(&self, name: &str) -> Option<TensorRef<'a, M>> {
        let index = self.call.operands.iter().position(|(of, array)| *of == name && array.dims != [0]);
        index.map(self.operand)
    }

    fn operand(&self, name: &str) -> TensorRef<'a, M> {
        let index = self.call.operands.iter().position(|(of, _)| *of == name);
        (self.operand)(index.unwrap_or_else(|| panic!("{} has no {name}", self.call.target)))
    }

    fn optional_result(&self, name: &str) -> Option<TensorMut<'a, M>> {
        let index = self.call.results.iter().position(|of| of.name == name && of.dims != [0]);
        index.map(self.result)
    }

    fn result(&self, name: &str) -> TensorMut<'a, M> {
        self.optional_result(name).unwrap()
    }

    fn attribute(&self, name: &str) -> &Attr {
        &self.call.attributes.iter().find(|(of, _)| *of == name).unwrap().1
    }

    fn flag(&self, name: &str) -> bool {
        *self.attribute(name) == Attr::Bool(true)
    }

    fn real(&self, name: &str) -> f32 {
        if let Attr::F32(value) = self.attribute(name) { *value } else { panic!("{name} is no f32") }
    }

    /// What is not negative.
    fn count(&self, name: &str) -> Option<usize> {
        if let Attr::I64(value) = self.attribute(name) { usize::try_from(*value).ok() } else { panic!("{name}") }
    }

    fn attention_results(&self) -> AttentionResults<'a, M> {
        let (softmax_lse, workspace) = (self.optional_result("softmax_lse"), self.optional_result("workspace"));
        AttentionResults { softmax_lse, workspace, ..self.result("out").into() }
    }
}

/// K and V as the attribute `kv_layout` says.
fn kv<T>(layout: Option<usize>, first: T, second: Option<T>) -> Kv<T> {
    match (layout, second) {
        (Some(0), Some(v)) => Kv::Split { k: first, v },
        (Some(1), None) => Kv::Interleaved(first),
        (Some(2), None) => Kv::Stacked(first),
        (Some(3), None) => Kv::PerPage(first),
        (layout, _) => panic!("kv_layout {layout:?} with another number of tensors"),
    }
}

/// Call the function of the target.
fn run<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    match of.call.target {
        "xla_gpu_simple_add" => simple_add(of.operand("a"), of.operand("b"), of.result("out"), on),
        "xla_gpu_merge_attention_states" => {
            let state = |out, lse| AttentionState { out: of.operand(out), lse: of.operand(lse) };
            let merged = AttentionState { out: of.result("out"), lse: of.result("lse") };
            merge_attention_states(&state("out_a", "lse_a"), &state("out_b", "lse_b"), merged, on)
        }
        "xla_gpu_kv_cache_update" => update(of, kv(of.count("kv_layout"), of.result("kv_cache"), None), on),
        "xla_gpu_kv_cache_update_split" => {
            update(of, kv(Some(0), of.result("k_cache"), Some(of.result("v_cache"))), on)
        }
        "xla_gpu_gather_kv_cache" => gather(of, on),
        "xla_gpu_rope_kv_cache_update" => rope(of, on),
        "xla_gpu_paged_attention" => paged(of, on),
        "xla_gpu_paged_attention_update" => paged_update(of, on),
        "xla_gpu_flash_attn_varlen" => flash(of, on),
        "xla_gpu_flash_attn_varlen_bwd" => flash_bwd(of, on),
        other => panic!("{other} has no function"),
    }
}

fn update<M: Memory>(of: &Tensors<M>, cache: Kv<TensorMut<M>>, on: On<M>) -> Result {
    let inputs = KvCacheUpdateInputs {
        key: of.operand("key"),
        value: of.operand("value"),
        slot_mapping: of.operand("slot_mapping"),
    };
    let options = KvCacheUpdateOptions { k_scale: of.optional("k_scale"), v_scale: of.optional("v_scale") };
    kv_cache_update(&inputs, &options, cache, on)
}

fn gather<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let inputs = GatherKvCacheInputs {
        kv_cache: kv(of.count("kv_layout"), of.operand("k_cache"), of.optional("v_cache")),
        block_tables: of.operand("block_tables"),
        context_lens: of.operand("context_lens"),
    };
    let options = GatherKvCacheOptions { k_scale: of.optional("k_scale"), v_scale: of.optional("v_scale") };
    let (keys, values, cu_seqlens) = (of.result("keys"), of.result("values"), of.result("cu_seqlens"));
    gather_kv_cache(&inputs, &options, GatherKvCacheResults { keys, values, cu_seqlens }, on)
}

fn rope<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let inputs = RopeKvCacheUpdateInputs {
        query: of.operand("query"),
        key: of.operand("key"),
        value: of.operand("value"),
        slot_mapping: of.operand("slot_mapping"),
        positions: of.operand("positions"),
        cos_sin: of.operand("cos_sin"),
    };
    let options = RopeKvCacheUpdateOptions {
        interleaved: of.flag("interleaved"),
        k_scale: of.optional("k_scale"),
        v_scale: of.optional("v_scale"),
    };
    let kv_cache = kv(of.count("kv_layout"), of.result("kv_cache"), None);
    let results = RopeKvCacheUpdateResults { kv_cache, query_out: of.result("query_out") };
    rope_kv_cache_update(&inputs, &options, results, on)
}

fn paged<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let inputs = PagedAttentionInputs {
        query: of.operand("query"),
        kv_cache: of.operand("kv_cache"),
        context_lens: of.operand("context_lens"),
        block_tables: of.operand("block_tables"),
        query_start_loc: of.operand("query_start_loc"),
        num_seqs: of.operand("num_seqs"),
    };
    paged_attention(&inputs, &paged_options(of), of.attention_results(), on)
}

fn paged_update<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let inputs = PagedAttentionUpdateInputs {
        query: of.operand("query"),
        context_lens: of.operand("context_lens"),
        block_tables: of.operand("block_tables"),
        query_start_loc: of.operand("query_start_loc"),
        num_seqs: of.operand("num_seqs"),
        key: of.operand("key"),
        value: of.operand("value"),
        slot_mapping: of.operand("slot_mapping"),
    };
    paged_attention_update(&inputs, &paged_options(of), of.result("kv_cache"), of.attention_results(), on)
}

fn paged_options<'a, M: Memory>(of: &Tensors<'a, M>) -> PagedAttentionOptions<'a, M> {
    PagedAttentionOptions {
        scale: Some(of.real("scale")),
        sliding_window: of.count("sliding_window"),
        soft_cap: of.real("soft_cap"),
        alibi_slopes: of.optional("alibi_slopes"),
        sinks: of.optional("sinks"),
        q_scale: of.optional("q_scale"),
        k_scale: of.optional("k_scale"),
        v_scale: of.optional("v_scale"),
        batch_invariant: of.flag("batch_invariant"),
    }
}

fn flash<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let inputs = FlashAttnVarlenInputs {
        q: of.operand("q"),
        kv: kv(of.count("kv_layout"), of.operand("k"), of.optional("v")),
        cu_seqlens_q: of.operand("cu_seqlens_q"),
    };
    let options = FlashAttnVarlenOptions {
        cu_seqlens_k: Some(of.operand("cu_seqlens_k")),
        seqused_k: of.optional("seqused_k"),
        block_table: of.optional("block_table"),
        seqused_q: of.optional("seqused_q"),
        leftpad_k: of.optional("leftpad_k"),
        alibi_slopes: of.optional("alibi_slopes"),
        sinks: of.optional("sinks"),
        q_scale: of.optional("q_scale"),
        k_scale: of.optional("k_scale"),
        v_scale: of.optional("v_scale"),
        softmax_scale: Some(of.real("softmax_scale")),
        softcap: of.real("softcap"),
        causal: of.flag("causal"),
        window_left: of.count("window_left"),
        window_right: of.count("window_right"),
        top_left: of.flag("top_left"),
        max_seqlen_q: of.count("max_seqlen_q"),
        max_seqlen_k: of.count("max_seqlen_k"),
        batch_invariant: of.flag("batch_invariant"),
    };
    flash_attn_varlen(&inputs, &options, of.attention_results(), on)
}

fn flash_bwd<M: Memory>(of: &Tensors<M>, on: On<M>) -> Result {
    let inputs = FlashAttnVarlenBwdInputs {
        dout: of.operand("dout"),
        q: of.operand("q"),
        k: of.operand("k"),
        v: of.operand("v"),
        out: of.operand("out"),
        softmax_lse: of.operand("softmax_lse"),
        cu_seqlens_q: of.operand("cu_seqlens_q"),
    };
    let options = FlashAttnVarlenBwdOptions {
        cu_seqlens_k: Some(of.operand("cu_seqlens_k")),
        seqused_k: of.optional("seqused_k"),
        seqused_q: of.optional("seqused_q"),
        leftpad_k: of.optional("leftpad_k"),
        alibi_slopes: of.optional("alibi_slopes"),
        sinks: of.optional("sinks"),
        dlse: of.optional("dlse"),
        softmax_scale: Some(of.real("softmax_scale")),
        softcap: of.real("softcap"),
        causal: of.flag("causal"),
        window_left: of.count("window_left"),
        window_right: of.count("window_right"),
        top_left: of.flag("top_left"),
        max_seqlen_q: of.count("max_seqlen_q"),
        max_seqlen_k: of.count("max_seqlen_k"),
        deterministic: of.flag("deterministic"),
    };
    let (dsinks, workspace) = (of.optional_result("dsinks"), of.optional_result("workspace"));
    let gradients = [of.result("dq"), of.result("dk"), of.result("dv")];
    flash_attn_varlen_bwd(&inputs, &options, FlashAttnVarlenBwdResults { dsinks, workspace, ..gradients.into() }, on)
}
