//! Threads for the CPU backend: XLA's pool where XLA calls us, rayon's where nobody brings one.

use crate::error::{Error, Result};
use crate::fault::{self, Fault};
use crate::guard::guarded;
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
    /// Threads that can work at the same time, the caller's among them or not.
    fn num_threads(&self) -> usize;
    /// Run `task(argument)`; may return before or after it has run.
    fn schedule(&self, task: fn(usize), argument: usize);
}

/// rayon's global pool: for the Rust API and for callers of `xa_call` without a pool.
pub struct RayonPool;

// SAFETY: rayon runs what it spawns once. Only making its threads can panic, which `num_threads` does before.
unsafe impl Pool for RayonPool {
    fn num_threads(&self) -> usize {
        rayon::current_num_threads()
    }
    fn schedule(&self, task: fn(usize), argument: usize) {
        rayon::spawn(move || task(argument));
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
    done: AtomicUsize,
    panicked: AtomicUsize,
    /// The text of a panic; of one of them if there were several.
    panic: OnceLock<String>,
    /// Goes off in the first task.
    planted: Option<Fault>,
    count: usize,
    body: *const (),
    run: unsafe fn(*const (), &Job),
}

// SAFETY: `body` points to a `Sync` closure that outlives every access (see `parallel_for`).
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    /// The next index nobody has taken.
    fn take(&self) -> Option<usize> {
        let index = self.next.fetch_add(1, Relaxed);
        (index < self.count).then_some(index)
    }
}

/// Run `body(&mut scratch, index)` for every index below `count`, on the calling thread and the pool's.
///
/// The caller takes indices too and waits only for indices that some thread has started, so this cannot deadlock even
/// on a pool of one thread whose only worker is the caller. Each participating thread makes its own `scratch`, once.
/// Indices are taken in order.
///
/// # Errors
/// `INTERNAL` with the text of a panic if `body` panicked for some index; the others have run all the same.
pub fn parallel_for<S, I, F>(pool: &dyn Pool, count: usize, scratch: I, body: F) -> Result
where
    I: Fn() -> S + Sync,
    F: Fn(&mut S, usize) + Sync,
{
    unsafe fn run<S, I: Fn() -> S, F: Fn(&mut S, usize)>(both: *const (), job: &Job) {
        let mut mine = None;
        while let Some(index) = job.take() {
            // SAFETY: an index was taken, so the caller is still waiting and its closures are alive.
            let (scratch, body) = unsafe { &*both.cast::<(I, F)>() };
            let result = guarded(|| {
                if let (0, Some(fault)) = (index, job.planted) {
                    fault::panic(fault);
                }
                body(mine.get_or_insert_with(scratch), index);
            });
            if let Err(text) = result {
                // Somebody faster has told.
                drop(job.panic.set(text));
                job.panicked.fetch_add(1, Relaxed);
            }
            job.done.fetch_add(1, Release);
        }
    }
    fn help(argument: usize) {
        // SAFETY: made by `Arc::into_raw` below, once for each scheduled helper.
        let job = unsafe { Arc::from_raw(argument as *const Job) };
        // SAFETY: `body` and `run` were made for each other in `parallel_for`.
        unsafe { (job.run)(job.body, &job) };
    }

    let on_caller = fault::takes(Fault::CpuCaller);
    let helpers = if on_caller { 0 } else { pool.num_threads().min(count).saturating_sub(1) };
    let on_worker = helpers > 0 && fault::takes(Fault::CpuWorker);
    let both = (scratch, body);
    let job = Arc::new(Job {
        next: 0.into(),
        done: 0.into(),
        panicked: 0.into(),
        panic: OnceLock::new(),
        planted: if on_caller { Some(Fault::CpuCaller) } else { on_worker.then_some(Fault::CpuWorker) },
        count,
        body: (&raw const both).cast(),
        run: run::<S, I, F>,
    });
    for _ in 0..helpers {
        pool.schedule(help, Arc::into_raw(Arc::clone(&job)) as usize);
    }
    if !on_worker {
        // SAFETY: `both` lives to the end of this function, which returns only after every taken index is done.
        unsafe { run::<S, I, F>(job.body, &job) };
    }
    while job.done.load(Acquire) < count {
        std::hint::spin_loop();
    }
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

    #[test]
    fn nothing_to_do_is_fine() {
        parallel_for(&RayonPool, 0, || (), |(), _| unreachable!()).unwrap();
    }
}
