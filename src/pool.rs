//! Threads for the CPU backend: XLA's pool where XLA calls us, rayon's elsewhere.

use crate::error::{Error, Result};
use crate::failpoint::{self, Failpoint};
use crate::panic_boundary::catch_panic;
use std::error::Error as _;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, OnceLock};

/// A thread pool that runs a function some time, on some thread, perhaps at once on the calling one.
///
/// # Safety
/// [`Pool::schedule`] runs `task(argument)` once or never, and does not unwind: helpers that it has started work with
/// memory of the function that called it.
pub unsafe trait Pool: Sync {
    /// Threads that can work at the same time, the caller's among them or not; 0 counts as 1.
    fn num_threads(&self) -> usize;
    /// Run `task(argument)`; may return before or after it has run.
    fn schedule(&self, task: fn(usize), argument: usize);
}

/// rayon's global pool: for the Rust API and for callers of `xa_call` without a pool.
///
/// It has one thread, the caller's, where rayon's threads could not be made, and in a child of the process that made
/// them: a fork leaves the threads behind, and what is scheduled there would never run or be freed.
pub struct RayonPool;

impl RayonPool {
    /// Whether rayon's threads run in this process; the first call makes them.
    fn has_threads() -> bool {
        static MADE_IN: OnceLock<Option<u32>> = OnceLock::new();
        let made_in = MADE_IN.get_or_init(|| {
            let made = match rayon::ThreadPoolBuilder::new().build_global() {
                Ok(()) => true,
                // The system's refusal has a source. Without one a pool exists, or an attempt before ours has failed:
                // then rayon panics.
                Err(e) => e.source().is_none() && catch_panic(rayon::current_num_threads).is_ok(),
            };
            made.then(std::process::id)
        });
        *made_in == Some(std::process::id())
    }
}

// SAFETY: rayon runs what it spawns once, and once its pool has been made, scheduling does not panic.
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

/// No thread but the caller's.
pub struct SingleThread;

// SAFETY: once, and a task does not unwind.
unsafe impl Pool for SingleThread {
    fn num_threads(&self) -> usize {
        1
    }
    fn schedule(&self, task: fn(usize), argument: usize) {
        task(argument);
    }
}

/// Shared by the caller and the helpers; a helper that arrives late finds no index left and touches nothing but this.
struct Job {
    next: AtomicUsize,
    /// Indices of threads that have dropped their scratch.
    done: AtomicUsize,
    panicked: AtomicUsize,
    /// The text of a panic; of one of them if there were several.
    panic: OnceLock<String>,
    /// Goes off in the first task.
    failpoint: Option<Failpoint>,
    count: usize,
    body: *const (),
    run: unsafe fn(*const (), &Job),
}

// SAFETY: `body` points to a `Sync` closure that outlives every access (see `parallel_for`).
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    /// The next index that no thread has taken.
    fn take(&self) -> Option<usize> {
        let index = self.next.fetch_add(1, Relaxed);
        (index < self.count).then_some(index)
    }

    /// Do `work`, and remember if it panics.
    fn run_part(&self, work: impl FnOnce()) {
        if let Err(text) = catch_panic(work) {
            // The text of an earlier panic stays.
            drop(self.panic.set(text));
            self.panicked.fetch_add(1, Relaxed);
        }
    }

    /// Return when all indices are done: after a while of spinning, other threads get the core.
    fn wait(&self) {
        const SPINS: usize = 1 << 10;
        let mut spins = 0;
        while self.done.load(Acquire) < self.count {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

/// Run `body(&mut scratch, index)` for every index below `count`, on the calling thread and the pool's.
///
/// The caller takes indices too and waits only for indices that some thread has started, so this cannot deadlock even
/// on a pool of one thread whose only worker is the caller. Each participating thread makes its own `scratch`, once, and
/// has dropped it when this returns. Indices are taken in order.
///
/// # Errors
/// `INTERNAL` with the text of a panic if `body` panicked for some index, or making or dropping a scratch did; the other
/// indices have run all the same.
pub fn parallel_for<S, I, F>(pool: &dyn Pool, count: usize, scratch: I, body: F) -> Result
where
    I: Fn() -> S + Sync,
    F: Fn(&mut S, usize) + Sync,
{
    unsafe fn run<S, I: Fn() -> S, F: Fn(&mut S, usize)>(both: *const (), job: &Job) {
        let (mut mine, mut taken) = (None, 0);
        while let Some(index) = job.take() {
            taken += 1;
            // SAFETY: an index was taken and is not counted as done, so the caller is still waiting and its closures are
            // alive.
            let (scratch, body) = unsafe { &*both.cast::<(I, F)>() };
            job.run_part(|| {
                if let (0, Some(failpoint)) = (index, job.failpoint) {
                    failpoint::panic(failpoint);
                }
                body(mine.get_or_insert_with(scratch), index);
            });
        }
        // The scratch may borrow from the caller, who waits for the indices that are counted only after it is gone.
        job.run_part(|| drop(mine));
        job.done.fetch_add(taken, Release);
    }
    fn help(argument: usize) {
        // SAFETY: made by `Arc::into_raw` below, once for each scheduled helper.
        let job = unsafe { Arc::from_raw(argument as *const Job) };
        // SAFETY: `body` and `run` were made for each other in `parallel_for`.
        unsafe { (job.run)(job.body, &job) };
    }

    let on_caller = failpoint::take(Failpoint::CpuCaller);
    let helpers = if on_caller { 0 } else { pool.num_threads().min(count).saturating_sub(1) };
    let on_worker = helpers > 0 && failpoint::take(Failpoint::CpuWorker);
    let both = (scratch, body);
    let job = Arc::new(Job {
        next: 0.into(),
        done: 0.into(),
        panicked: 0.into(),
        panic: OnceLock::new(),
        failpoint: if on_caller { Some(Failpoint::CpuCaller) } else { on_worker.then_some(Failpoint::CpuWorker) },
        count,
        body: (&raw const both).cast(),
        run: run::<S, I, F>,
    });
    for _ in 0..helpers {
        pool.schedule(help, Arc::into_raw(Arc::clone(&job)) as usize);
    }
    if !on_worker {
        // SAFETY: `both` lives to the end of this function, which waits for every taken index, also when a task, a
        // scratch or its destructor panics.
        unsafe { run::<S, I, F>(job.body, &job) };
    }
    job.wait();
    match job.panicked.load(Relaxed) {
        0 => Ok(()),
        n => {
            let text = job.panic.get().map_or("", String::as_str);
            Err(Error::internal(format!("{n} of {count} parallel tasks panicked: {text}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Keeps tasks until it is dropped: helpers that arrive after the call has returned.
    #[derive(Default)]
    struct LatePool(Mutex<Vec<Task>>);
    type Task = (fn(usize), usize);
    // SAFETY: the one test that uses it runs each task once.
    unsafe impl Pool for LatePool {
        fn num_threads(&self) -> usize {
            4
        }
        fn schedule(&self, task: fn(usize), argument: usize) {
            self.0.lock().unwrap().push((task, argument));
        }
    }

    fn each_index_once(pool: &dyn Pool) {
        let seen: Vec<AtomicUsize> = (0..1000).map(|_| 0.into()).collect();
        parallel_for(
            pool,
            seen.len(),
            || (),
            |(), i| {
                seen[i].fetch_add(1, Relaxed);
            },
        )
        .unwrap();
        assert!(seen.iter().all(|n| n.load(Relaxed) == 1));
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

    // SAFETY: as of `RayonPool`.
    unsafe impl Pool for rayon::ThreadPool {
        fn num_threads(&self) -> usize {
            self.current_num_threads()
        }
        fn schedule(&self, task: fn(usize), argument: usize) {
            self.spawn(move || task(argument));
        }
    }

    /// A scratch that is slow to go, and looks at what it borrows then.
    struct Borrowing<'a>(&'a AtomicUsize);

    impl Drop for Borrowing<'_> {
        fn drop(&mut self) {
            std::thread::sleep(std::time::Duration::from_millis(5));
            self.0.fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn every_scratch_is_gone_when_the_call_returns() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
        for _ in 0..20 {
            let (made, dropped) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let scratch = || {
                made.fetch_add(1, Relaxed);
                Borrowing(&dropped)
            };
            let nap = |_: &mut Borrowing, _| std::thread::sleep(std::time::Duration::from_micros(200));
            parallel_for(&pool, 32, scratch, nap).unwrap();
            assert_eq!(dropped.load(Relaxed), made.load(Relaxed));
        }
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
    fn nothing_to_do_is_fine() {
        parallel_for(&RayonPool, 0, || (), |(), _| unreachable!()).unwrap();
    }
}
