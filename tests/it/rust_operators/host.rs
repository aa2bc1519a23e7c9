//! Host tensors: arguments with defaults, strided rows, and thread pools.

use super::driver::on_cpu;
use crate::support::{AttentionCase, BatchSpec, MemoryLayout, Random, ReferenceCase};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use xla_attention::{
    FlashAttnVarlenInputs, FlashAttnVarlenOptions, Kv, On, Pool, RayonPool, SingleThread, TensorMut, TensorRef,
    flash_attn_varlen,
};

fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.normal() as f32).collect()
}

/// `flash_attn_varlen` with two sequences of 3 and 2 rows, 4 query heads, 2 KV heads and D = 16.
fn flash(q: TensorRef, kv: &Kv<TensorRef>, options: &FlashAttnVarlenOptions) -> Vec<f32> {
    let inputs = FlashAttnVarlenInputs { q, kv: *kv, cu_seqlens_q: TensorRef::new(&[0, 3, 5], &[3]) };
    let mut out = vec![f32::NAN; 5 * 4 * 16];
    flash_attn_varlen(&inputs, options, TensorMut::new(&mut out, &[5, 4, 16]), On::cpu()).unwrap();
    out
}

#[test]
fn omitted_scales_and_starts_of_keys_have_their_defaults() {
    let (q, k, v) = (random(5 * 4 * 16, 1), random(5 * 2 * 16, 2), random(5 * 2 * 16, 3));
    let kv = &Kv::Split { k: TensorRef::new(&k, &[5, 2, 16]), v: TensorRef::new(&v, &[5, 2, 16]) };
    let q = TensorRef::new(&q, &[5, 4, 16]);
    let cu_seqlens_k = Some(TensorRef::new(&[0, 3, 5], &[3]));
    let explicit = FlashAttnVarlenOptions { softmax_scale: Some(0.25), cu_seqlens_k, ..Default::default() };
    assert_eq!(flash(q, kv, &FlashAttnVarlenOptions::default()), flash(q, kv, &explicit));

    // The same keys in pages of two tokens. Sequence b has the pages 2b and 2b + 1.
    let (mut k_pages, mut v_pages) = (vec![f32::NAN; 4 * 2 * 2 * 16], vec![f32::NAN; 4 * 2 * 2 * 16]);
    for (row, slot) in [0, 1, 2, 4, 5].into_iter().enumerate() {
        k_pages[slot * 32..][..32].copy_from_slice(&k[row * 32..][..32]);
        v_pages[slot * 32..][..32].copy_from_slice(&v[row * 32..][..32]);
    }
    let [k, v] = [&k_pages, &v_pages].map(|pages| TensorRef::new(pages, &[4, 2, 2, 16]));
    let block_table = Some(TensorRef::new(&[0, 1, 2, 3], &[2, 2]));
    let by_length =
        FlashAttnVarlenOptions { seqused_k: Some(TensorRef::new(&[3, 2], &[2])), block_table, ..Default::default() };
    let by_starts = FlashAttnVarlenOptions { cu_seqlens_k, block_table, ..Default::default() };
    let paged = &Kv::Split { k, v };
    assert_eq!(flash(q, paged, &by_length), flash(q, kv, &explicit));
    assert_eq!(flash(q, paged, &by_starts), flash(q, kv, &explicit));
}

#[test]
fn strided_rows_give_the_result_of_dense_rows() {
    // [T, Hq + 2 * Hkv, D]. The last row ends with the memory.
    let qkv = random(5 * 8 * 16, 4);
    let part = |first: usize, heads: usize| {
        let end = 4 * 128 + (first + heads) * 16;
        TensorRef::new(&qkv[first * 16..end], &[5, heads, 16]).with_strides(&[128, 16, 1])
    };
    let packed = |first: usize, heads: usize| -> Vec<f32> {
        qkv.chunks(128).flat_map(|row| row[first * 16..][..heads * 16].iter().copied()).collect()
    };
    let (q, k, v) = (packed(0, 4), packed(4, 2), packed(6, 2));
    let kv = &Kv::Split { k: TensorRef::new(&k, &[5, 2, 16]), v: TensorRef::new(&v, &[5, 2, 16]) };
    let options = FlashAttnVarlenOptions { causal: true, ..Default::default() };
    let apart = flash(part(0, 4), &Kv::Split { k: part(4, 2), v: part(6, 2) }, &options);
    assert_eq!(apart, flash(TensorRef::new(&q, &[5, 4, 16]), kv, &options));
}

/// Counts its tasks and passes them to rayon.
#[derive(Default)]
struct CountingPool(AtomicUsize);

// SAFETY: rayon's pool runs each task once.
unsafe impl Pool for CountingPool {
    fn num_threads(&self) -> usize {
        3
    }
    fn schedule(&self, task: fn(usize), argument: usize) {
        self.0.fetch_add(1, Relaxed);
        RayonPool.schedule(task, argument);
    }
}

#[test]
fn the_given_pool_runs_the_work() {
    let spec = BatchSpec { lengths: vec![(40, 300), (70, 200), (33, 33)], ..BatchSpec::default() };
    let case = AttentionCase::paged(&spec.batch(), &MemoryLayout::default());
    let pool = CountingPool::default();
    let actual = [On::pool(&pool), On::pool(&SingleThread), On::cpu()].map(|on| {
        let results = on_cpu(&case.invocation(), on).unwrap();
        case.computed(&results)
    });
    assert!(pool.0.load(Relaxed) > 0);
    assert!(actual[0] == actual[1] && actual[0] == actual[2]);
}
