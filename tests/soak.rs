//! The library's memory does not grow over many calls, nor in a forked child; and its behaviour if the system refuses
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
const MAX_ROWS: usize = 12;
const MAX_SEQS: usize = 4;
const PAGES: usize = 16;
const PAGE_SIZE: usize = 8;

/// Resident bytes of this process.
fn resident() -> usize {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// A random number generator that gives the same numbers in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// The memory of all calls, each of which uses the beginning.
struct Memory {
    query: Vec<f32>,
    cache: Vec<f32>,
    out: Vec<f32>,
}

impl Memory {
    /// Calls `paged_attention` with random shapes, some of them invalid. Returns whether they were.
    fn call(&mut self, numbers: &mut Numbers) -> bool {
        let (kv_heads, group, d) = (1 + numbers.below(2), 1 + numbers.below(3), 8 * (1 + numbers.below(8)));
        let (rows, seqs) = (1 + numbers.below(MAX_ROWS), 1 + numbers.below(MAX_SEQS));
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
    let max_heads = 6;
    let mut memory = Memory {
        query: vec![0.5; MAX_ROWS * max_heads * 80],
        cache: vec![0.25; PAGES * PAGE_SIZE * 4 * 64],
        out: vec![0.0; MAX_ROWS * max_heads * 64],
    };
    let mut numbers = Numbers(1);
    for _ in 0..CALLS / 10 {
        memory.call(&mut numbers);
    }
    let before = resident();
    let refused = (0..CALLS).filter(|_| memory.call(&mut numbers)).count();
    let grown = resident().saturating_sub(before);
    assert!(refused > CALLS / 20, "{refused} calls were wrong");
    // A leak of one byte per call would be 100 KB. The allocator's own size varies by some pages.
    assert!(grown < 2 << 20, "{CALLS} calls left {grown} bytes behind");
}

/// Returns whether this is a child process. Otherwise runs the test of this name in one, whose limits and forks affect
/// no other test. The child has several threads in rayon's pool on any machine.
fn is_own_process(test: &str) -> bool {
    if std::env::var_os("XLA_ATTENTION_TEST_CHILD").is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env("XLA_ATTENTION_TEST_CHILD", "1");
    // A single arena, because the reserved addresses of another one would escape the limit.
    command.envs([("RAYON_NUM_THREADS", "8"), ("MALLOC_ARENA_MAX", "1")]);
    let done = command.output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&done.stderr));
    false
}

/// Limits the address space of this process to this many bytes more than it has; `None` removes the limit.
fn limit_memory(further: Option<usize>) {
    let mapped = || {
        let pages = fs::read_to_string("/proc/self/statm").unwrap();
        pages.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 4096
    };
    let soft = further.map_or(libc::RLIM_INFINITY, |further| (mapped() + further) as libc::rlim_t);
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: sets a limit of this process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
}

/// `out = a + a`, with enough elements that several threads take part.
fn add(a: &[f32], out: &mut [f32]) -> Result {
    let (dims, a) = ([a.len()], TensorRef::new(a, &[a.len()]));
    simple_add(a, a, TensorMut::new(out, &dims), On::cpu())
}

#[test]
fn a_forked_child_keeps_nothing_of_its_calls() {
    let true = is_own_process("a_forked_child_keeps_nothing_of_its_calls") else { return };
    let (a, mut out) = (vec![1.0f32; 1 << 17], vec![0.0f32; 1 << 17]);
    add(&a, &mut out).unwrap();
    // SAFETY: the child only computes and exits; glibc's allocator works after a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut calls = |count| (0..count).all(|_| add(&a, &mut out).is_ok());
        let is_correct = calls(100);
        let before = resident();
        let is_correct = is_correct && calls(5_000) && out.iter().all(|x| x.to_bits() == 2.0f32.to_bits());
        // The scheduled tasks alone would leak 1 KB per call.
        let flat = resident().saturating_sub(before) < 1 << 20;
        // SAFETY: ends the child without running the test harness's exit handlers.
        unsafe { libc::_exit(i32::from(!is_correct) + 2 * i32::from(!flat)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child and writes a number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "bit 8: a call failed, bit 9: memory grew");
    add(&a, &mut out).unwrap();
}

#[test]
fn without_threads_the_caller_computes_alone() {
    let true = is_own_process("without_threads_the_caller_computes_alone") else { return };
    let (a, mut out) = (vec![1.0f32; 1 << 17], vec![0.0f32; 1 << 17]);
    // Less than a thread's stack needs.
    limit_memory(Some(1 << 20));
    assert!(std::thread::Builder::new().spawn(|| ()).is_err());
    let while_limited = add(&a, &mut out);
    limit_memory(None);
    while_limited.unwrap();
    assert!(out.iter().all(|x| x.to_bits() == 2.0f32.to_bits()));
    add(&a, &mut out).unwrap();
}

/// Calls `flash_attn_varlen` for one sequence of `rows` queries and keys.
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
    // Enough for the small allocations of a call.
    limit_memory(Some(1 << 18));
    let refused = large();
    limit_memory(None);
    let error = refused.unwrap_err();
    assert_eq!(error.code, Code::ResourceExhausted, "{error}");
    assert!(error.message.starts_with("xla_gpu_flash_attn_varlen: no memory for "), "{error}");
    large().unwrap();
}
