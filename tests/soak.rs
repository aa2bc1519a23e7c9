//! What the library keeps does not grow over many calls, nor in a forked child; and what it does where the system refuses
//! memory or threads.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::fs;
use std::process::Command;
use xla_attention::{
    Code, FlashAttnVarlenInputs, FlashAttnVarlenOptions, Kv, On, PagedAttentionInputs, PagedAttentionOptions, Result,
    TensorMut, TensorRef, flash_attn_varlen, paged_attention, simple_add,
};

const CALLS: usize = 100_000;
const MOST_ROWS: usize = 12;
const MOST_SEQS: usize = 4;
const PAGES: usize = 16;
const PAGE_SIZE: usize = 8;

/// Bytes of this process that are in memory.
fn resident() -> usize {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Numbers that look random, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// The memory of all calls; each uses the beginnings.
struct Memory {
    query: Vec<f32>,
    cache: Vec<f32>,
    out: Vec<f32>,
}

impl Memory {
    /// A call of `paged_attention` with shapes of its own, and some that are wrong.
    fn call(&mut self, numbers: &mut Numbers) -> bool {
        let (kv_heads, group, d) = (1 + numbers.below(2), 1 + numbers.below(3), 8 * (1 + numbers.below(8)));
        let (rows, seqs) = (1 + numbers.below(MOST_ROWS), 1 + numbers.below(MOST_SEQS));
        let heads = kv_heads * group;
        let lens: Vec<i32> = (0..seqs).map(|_| numbers.below(4 * PAGE_SIZE) as i32).collect();
        let table: Vec<i32> = (0..4 * seqs).map(|_| numbers.below(PAGES) as i32).collect();
        let starts: Vec<i32> = (0..=seqs).map(|i| (i * rows / seqs) as i32).collect();
        let (count, wrong) = ([seqs as i32], numbers.below(10) == 0);
        let wide = if wrong { d + 8 } else { d };
        let cache_dims = [PAGES, PAGE_SIZE, 2 * kv_heads, d];
        let inputs = PagedAttentionInputs {
            query: TensorRef::new(&self.query[..rows * heads * wide], &[rows, heads, wide]),
            kv_cache: TensorRef::new(&self.cache[..cache_dims.iter().product()], &cache_dims),
            context_lens: TensorRef::new(&lens, &[seqs]),
            block_tables: TensorRef::new(&table, &[seqs, 4]),
            query_start_loc: TensorRef::new(&starts, &[seqs + 1]),
            num_seqs: TensorRef::new(&count, &[1]),
        };
        let out = TensorMut::new(&mut self.out[..rows * heads * d], &[rows, heads, d]);
        let outcome = paged_attention(&inputs, &PagedAttentionOptions::default(), out, On::cpu());
        assert_eq!(outcome.is_err(), wrong, "{outcome:?}");
        wrong
    }
}

#[test]
fn memory_stays_flat_over_100_000_calls_on_the_cpu() {
    let most_heads = 6;
    let mut memory = Memory {
        query: vec![0.5; MOST_ROWS * most_heads * 80],
        cache: vec![0.25; PAGES * PAGE_SIZE * 4 * 64],
        out: vec![0.0; MOST_ROWS * most_heads * 64],
    };
    let mut numbers = Numbers(1);
    for _ in 0..CALLS / 10 {
        memory.call(&mut numbers);
    }
    let before = resident();
    let refused = (0..CALLS).filter(|_| memory.call(&mut numbers)).count();
    let grown = resident().saturating_sub(before);
    assert!(refused > CALLS / 20, "{refused} calls were wrong");
    // One byte a call would be 100 KB; the allocator itself moves by some pages.
    assert!(grown < 2 << 20, "{CALLS} calls left {grown} bytes behind");
}

/// Run the test of this name where its limits and forks concern no other, with rayon's threads on any machine; whether this
/// is the process that was started for it.
fn is_own_process(test: &str) -> bool {
    if std::env::var_os("XLA_ATTENTION_TEST_CHILD").is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env("XLA_ATTENTION_TEST_CHILD", "1");
    // One arena of the allocator: another one's reserve of addresses is outside of what a limit can refuse.
    command.envs([("RAYON_NUM_THREADS", "8"), ("MALLOC_ARENA_MAX", "1")]);
    let done = command.output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&done.stderr));
    false
}

/// Give this process no more than so many further bytes of addresses; `None` is as many as there are.
fn limit_memory(further: Option<usize>) {
    let mapped = || {
        let pages = fs::read_to_string("/proc/self/statm").unwrap();
        pages.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 4096
    };
    let soft = further.map_or(libc::RLIM_INFINITY, |further| (mapped() + further) as libc::rlim_t);
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a limit of this process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
}

/// `out = a + a` of so many elements that several threads are asked to help.
fn add(a: &[f32], out: &mut [f32]) -> Result {
    let (dims, a) = ([a.len()], TensorRef::new(a, &[a.len()]));
    simple_add(a, a, TensorMut::new(out, &dims), On::cpu())
}

#[test]
fn a_forked_child_keeps_nothing_of_its_calls() {
    let true = is_own_process("a_forked_child_keeps_nothing_of_its_calls") else { return };
    let (a, mut out) = (vec![1.0f32; 1 << 17], vec![0.0f32; 1 << 17]);
    add(&a, &mut out).unwrap();
    // SAFETY: the child computes and ends; glibc has its allocator ready after a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut calls = |count| (0..count).all(|_| add(&a, &mut out).is_ok());
        let right = calls(100);
        let before = resident();
        let right = right && calls(5_000) && out.iter().all(|x| x.to_bits() == 2.0f32.to_bits());
        // What a scheduled task takes alone would be 1 KB a call.
        let flat = resident().saturating_sub(before) < 1 << 20;
        // SAFETY: the child ends here, without what the harness does at its end.
        unsafe { libc::_exit(i32::from(!right) + 2 * i32::from(!flat)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child, which writes a number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "bit 8: a call failed, bit 9: memory grew");
    add(&a, &mut out).unwrap();
}

#[test]
fn without_threads_the_caller_computes_alone() {
    let true = is_own_process("without_threads_the_caller_computes_alone") else { return };
    let (a, mut out) = (vec![1.0f32; 1 << 17], vec![0.0f32; 1 << 17]);
    // Less than the stack of a thread.
    limit_memory(Some(1 << 20));
    assert!(std::thread::Builder::new().spawn(|| ()).is_err());
    let while_limited = add(&a, &mut out);
    limit_memory(None);
    while_limited.unwrap();
    assert!(out.iter().all(|x| x.to_bits() == 2.0f32.to_bits()));
    add(&a, &mut out).unwrap();
}

/// A call of `flash_attn_varlen` on one sequence of `rows` rows and keys.
fn attend(rows: usize, heads: usize, d: usize) -> impl FnMut() -> Result {
    let (q, mut out) = (vec![0.5f32; rows * heads * d], vec![0.0f32; rows * heads * d]);
    let (dims, starts) = ([rows, heads, d], [0, rows as i32]);
    move || {
        let q = TensorRef::new(&q, &dims);
        let kv = Kv::Split { k: q, v: q };
        let inputs = FlashAttnVarlenInputs { q, kv, cu_seqlens_q: TensorRef::new(&starts, &[2]) };
        flash_attn_varlen(&inputs, &FlashAttnVarlenOptions::default(), TensorMut::new(&mut out, &dims), On::cpu())
    }
}

#[test]
fn a_call_without_memory_is_an_error() {
    let true = is_own_process("a_call_without_memory_is_an_error") else { return };
    attend(8, 1, 8)().unwrap();
    let mut large = attend(600, 4, 256);
    // Room for the small things that a call keeps.
    limit_memory(Some(1 << 18));
    let refused = large();
    limit_memory(None);
    let error = refused.unwrap_err();
    assert_eq!(error.code, Code::ResourceExhausted, "{error}");
    assert!(error.message.starts_with("xla_gpu_flash_attn_varlen: no memory for "), "{error}");
    large().unwrap();
}
