//! Thread pools for the CPU backend, and the parallel loop that runs on them. XLA's calls bring XLA's pool; other
//! callers use rayon's.

use crate::error::{Error, Result};
use crate::failpoint::{self, Failpoint};
use crate::panic_boundary::catch_panic;
use std::error::Error as _;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};

/// A thread pool that runs a function later on one of its threads, or at once on the calling thread.
///
/// # Safety
/// [`Pool::schedule`] runs `task(argument)` at most once and does not unwind: tasks that it has already started use
/// memory of its caller.
pub unsafe trait Pool: Sync {
    /// Threads that can work at the same time, with or without the caller's; 0 counts as 1.
    fn num_threads(&self) -> usize;
    /// Run `task(argument)`, before or after this returns.
    fn schedule(&self, task: fn(usize), argument: usize);
}

/// rayon's global pool, for the Rust API and for callers of `xa_call` without a pool.
///
/// It has only the caller's thread if rayon's threads could not be started, and in a forked child of the process that
/// started them: a fork does not copy threads, so tasks that are scheduled in the child would never run or be freed.
pub struct RayonPool;

impl RayonPool {
    /// Whether rayon's threads run in this process; the first call starts them.
    fn has_threads() -> bool {
        static STARTED_IN: OnceLock<Option<u32>> = OnceLock::new();
        let started_in = STARTED_IN.get_or_init(|| {
            let started = match rayon::ThreadPoolBuilder::new().build_global() {
                Ok(()) => true,
                // An error with a source is the system's refusal to start threads. Without a source, the pool exists
                // already, or an earlier attempt has failed, in which case rayon panics.
                Err(e) => e.source().is_none() && catch_panic(rayon::current_num_threads).is_ok(),
            };
            started.then(std::process::id)
        });
        *started_in == Some(std::process::id())
    }
}

// SAFETY: rayon runs a spawned closure once, and spawning does not panic once the pool exists.
unsafe impl Pool for RayonPool {
    fn num_threads(&self) -> usize {
        if Self::has_threads() { rayon::current_num_threads().max(1) } else { 1 }
    }
    fn schedule(&self, task: fn(usize), argument: usize) {
        if Self::has_threads() {
            rayon::spawn(move || task(argument));
        } else {
            task(argument);
        }
    }
}

/// A pool that runs everything on the calling thread.
pub struct SingleThread;

// SAFETY: the task runs once, at once; tasks of `parallel_for` catch their panics.
unsafe impl Pool for SingleThread {
    fn num_threads(&self) -> usize {
        1
    }
    fn schedule(&self, task: fn(usize), argument: usize) {
        task(argument);
    }
}

/// The state of a parallel loop, shared by the caller and its helper tasks. A helper that starts after the loop has
/// ended finds no index left and accesses nothing but this state.
struct ParallelLoop {
    /// The next index to run.
    next: AtomicUsize,
    /// Completed indices; a thread adds its own after it has dropped its scratch.
    done: AtomicUsize,
    /// The calling thread, which may be parked until all indices are done.
    caller: Thread,
    panicked: AtomicUsize,
    /// The text of the first panic.
    panic: OnceLock<String>,
    /// Triggered by index 0.
    failpoint: Option<Failpoint>,
    count: usize,
    /// The closures (scratch, body) of `parallel_for`, for `run`.
    closures: *const (),
    run: unsafe fn(*const (), &ParallelLoop),
}

// SAFETY: `closures` points to `Sync` closures. A thread accesses them only while it has an index that is not counted
// in `done`, and `parallel_for`, which owns them, waits for all indices.
unsafe impl Send for ParallelLoop {}
// SAFETY: all fields but `closures` are `Sync`, and so are the closures that it points to.
unsafe impl Sync for ParallelLoop {}

impl ParallelLoop {
    /// Take the next index, if there is one.
    fn take(&self) -> Option<usize> {
        let index = self.next.fetch_add(1, Relaxed);
        (index < self.count).then_some(index)
    }

    /// Run `work` and record its panic.
    fn catch(&self, work: impl FnOnce()) {
        if let Err(text) = catch_panic(work) {
            // `set` keeps the text of an earlier panic.
            drop(self.panic.set(text));
            self.panicked.fetch_add(1, Relaxed);
        }
    }

    /// Count `indices` as done; the thread that completes the loop wakes the caller.
    fn complete(&self, indices: usize) {
        if indices > 0 && self.done.fetch_add(indices, Release) + indices == self.count {
            self.caller.unpark();
        }
    }

    /// Wait, on the calling thread, until all indices are done: spin for some microseconds, then park.
    fn wait(&self) {
        const SPINS: usize = 1 << 10;
        let is_done = || self.done.load(Acquire) == self.count;
        for _ in 0..SPINS {
            if is_done() {
                return;
            }
            std::hint::spin_loop();
        }
        while !is_done() {
            thread::park();
        }
    }
}

/// Run `body(&mut scratch, index)` for every index below `count`, on the calling thread and the pool's.
///
/// The calling thread takes indices too and waits only for indices that a thread has started, so this cannot deadlock,
/// even if the pool's only thread is the caller. Each thread that takes an index makes a `scratch` once, and has
/// dropped it when this returns. Indices are taken in order.
///
/// # Errors
/// `INTERNAL` with the text of a panic, if `body`, making a scratch or dropping one panicked. All indices are run in
/// any case.
pub fn parallel_for<S, I, F>(pool: &dyn Pool, count: usize, scratch: I, body: F) -> Result
where
    I: Fn() -> S + Sync,
    F: Fn(&mut S, usize) + Sync,
{
    unsafe fn run<S, I: Fn() -> S, F: Fn(&mut S, usize)>(closures: *const (), state: &ParallelLoop) {
        let (mut own_scratch, mut taken) = (None, 0);
        while let Some(index) = state.take() {
            taken += 1;
            // SAFETY: this thread has an index that is not counted in `done`, so the caller is still waiting and its
            // closures are alive.
            let (scratch, body) = unsafe { &*closures.cast::<(I, F)>() };
            state.catch(|| {
                if let (0, Some(failpoint)) = (index, state.failpoint) {
                    failpoint::panic(failpoint);
                }
                body(own_scratch.get_or_insert_with(scratch), index);
            });
        }
        // The scratch may borrow from the caller, so it is dropped before the caller may stop waiting.
        state.catch(|| drop(own_scratch));
        state.complete(taken);
    }
    fn help(argument: usize) {
        // SAFETY: the argument comes from `Arc::into_raw` below, which counts one reference for each scheduled helper,
        // and the pool runs a helper at most once.
        let state = unsafe { Arc::from_raw(argument as *const ParallelLoop) };
        // SAFETY: `run` is the instance for the types of `closures`, and it accesses them only while the caller waits.
        unsafe { (state.run)(state.closures, &state) };
    }

    let on_caller = failpoint::take(Failpoint::CpuCaller);
    let helpers = if on_caller { 0 } else { pool.num_threads().min(count).saturating_sub(1) };
    let on_worker = helpers > 0 && failpoint::take(Failpoint::CpuWorker);
    let closures = (scratch, body);
    let state = Arc::new(ParallelLoop {
        next: 0.into(),
        done: 0.into(),
        caller: thread::current(),
        panicked: 0.into(),
        panic: OnceLock::new(),
        failpoint: if on_caller { Some(Failpoint::CpuCaller) } else { on_worker.then_some(Failpoint::CpuWorker) },
        count,
        closures: (&raw const closures).cast(),
        run: run::<S, I, F>,
    });
    for _ in 0..helpers {
        pool.schedule(help, Arc::into_raw(Arc::clone(&state)) as usize);
    }
    if !on_worker {
        // SAFETY: `closures` lives to the end of this function, which waits for all indices, also if a task, a scratch
        // or its destructor panics.
        unsafe { run::<S, I, F>(state.closures, &state) };
    }
    state.wait();
    match state.panicked.load(Relaxed) {
        0 => Ok(()),
        n => {
            let text = state.panic.get().map_or("", String::as_str);
            Err(Error::internal(format!("{n} of {count} parallel tasks panicked: {text}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Barrier, Mutex};
    use std::time::Duration;

    /// Only collects tasks, so that the test can run them after the loop has ended.
    #[derive(Default)]
    struct LatePool(Mutex<Vec<Task>>);
    type Task = (fn(usize), usize);
    // SAFETY: the only test that uses it runs each task once.
    unsafe impl Pool for LatePool {
        fn num_threads(&self) -> usize {
            4
        }
        fn schedule(&self, task: fn(usize), argument: usize) {
            self.0.lock().unwrap().push((task, argument));
        }
    }

    fn each_index_once(pool: &dyn Pool) {
        let runs: Vec<AtomicUsize> = (0..1000).map(|_| 0.into()).collect();
        parallel_for(
            pool,
            runs.len(),
            || (),
            |(), i| {
                runs[i].fetch_add(1, Relaxed);
            },
        )
        .unwrap();
        assert!(runs.iter().all(|n| n.load(Relaxed) == 1));
    }

    #[test]
    fn every_index_runs_once_on_every_kind_of_pool() {
        each_index_once(&RayonPool);
        each_index_once(&SingleThread);
        let late = LatePool::default();
        each_index_once(&late);
        for (task, argument) in late.0.into_inner().unwrap() {
            task(argument);
        }
    }

    #[test]
    fn a_panic_in_a_task_is_an_error_and_the_rest_still_runs() {
        let ran = AtomicUsize::new(0);
        let error = parallel_for(
            &RayonPool,
            10,
            || (),
            |(), i| {
                assert_ne!(i, 3, "planted");
                ran.fetch_add(1, Relaxed);
            },
        )
        .unwrap_err();
        assert!(error.message.starts_with("1 of 10 parallel tasks panicked: "), "{error}");
        assert!(error.message.contains("planted"), "{error}");
        assert_eq!(ran.load(Relaxed), 9);
    }

    // SAFETY: rayon runs a spawned closure once, and spawning on a pool that exists does not panic.
    unsafe impl Pool for rayon::ThreadPool {
        fn num_threads(&self) -> usize {
            self.current_num_threads()
        }
        fn schedule(&self, task: fn(usize), argument: usize) {
            self.spawn(move || task(argument));
        }
    }

    /// A scratch whose destructor is slow and accesses memory of the caller.
    struct Borrowing<'a>(&'a AtomicUsize);

    impl Drop for Borrowing<'_> {
        fn drop(&mut self) {
            thread::sleep(Duration::from_millis(5));
            self.0.fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn every_scratch_is_dropped_when_the_call_returns() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
        for _ in 0..20 {
            let (made, dropped) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let scratch = || {
                made.fetch_add(1, Relaxed);
                Borrowing(&dropped)
            };
            let nap = |_: &mut Borrowing, _| thread::sleep(Duration::from_micros(200));
            parallel_for(&pool, 32, scratch, nap).unwrap();
            assert_eq!(dropped.load(Relaxed), made.load(Relaxed));
        }
    }

    /// CPU time of this thread.
    fn cpu_time() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `clock_gettime` writes the struct, which is live.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    #[test]
    fn a_caller_that_waits_for_another_thread_uses_no_cpu_time() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let caller = thread::current().id();
        let used_before = cpu_time();
        // Each thread waits until the other one has an index too, and the caller ends first.
        let started = Barrier::new(2);
        let nap = |(): &mut (), _| {
            started.wait();
            if thread::current().id() != caller {
                thread::sleep(Duration::from_millis(200));
            }
        };
        parallel_for(&pool, 2, || (), nap).unwrap();
        let used = cpu_time().saturating_sub(used_before);
        assert!(used < Duration::from_millis(50), "{used:?}");
    }

    #[test]
    fn a_destructor_that_panics_is_an_error() {
        struct Fails;
        impl Drop for Fails {
            fn drop(&mut self) {
                panic!("planted in a destructor");
            }
        }
        for pool in [&RayonPool as &dyn Pool, &SingleThread] {
            let ran = AtomicUsize::new(0);
            let count = |_: &mut Fails, _| {
                ran.fetch_add(1, Relaxed);
            };
            let error = parallel_for(pool, 10, || Fails, count).unwrap_err();
            assert!(error.message.contains("planted in a destructor"), "{error}");
            assert_eq!(ran.load(Relaxed), 10);
        }
    }

    #[test]
    fn a_loop_without_indices_succeeds() {
        parallel_for(&RayonPool, 0, || (), |(), _| unreachable!()).unwrap();
    }
}
