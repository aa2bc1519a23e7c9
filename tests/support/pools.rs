//! Thread pools that a test passes to a handler as XLA's.

use std::ffi::c_void;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A task as XLA's C interface passes it.
pub struct Task {
    run: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
}

// SAFETY: XLA runs tasks on other threads, so the data of a task may be used there.
unsafe impl Send for Task {}

impl Task {
    pub fn new(run: unsafe extern "C" fn(*mut c_void), data: *mut c_void) -> Self {
        Self { run, data }
    }

    pub fn run(self) {
        // SAFETY: `data` is the argument that was passed with `run`, and each task runs once.
        unsafe { (self.run)(self.data) }
    }
}

/// The host's side of `XLA_FFI_ThreadPool_*`.
pub trait HostPool: Sync {
    /// `None` if the context has no pool, which XLA reports as an error.
    fn num_threads(&self) -> Option<i64>;
    /// Returns the task if there is no pool.
    fn schedule(&self, task: Task) -> Result<(), Task>;
}

/// Runs each task immediately on the calling thread, and claims to have this many threads.
pub struct InlinePool(pub i64);

impl HostPool for InlinePool {
    fn num_threads(&self) -> Option<i64> {
        Some(self.0)
    }
    fn schedule(&self, task: Task) -> Result<(), Task> {
        task.run();
        Ok(())
    }
}

// SAFETY: each task runs once. Tasks do not unwind.
unsafe impl xla_attention::Pool for InlinePool {
    fn num_threads(&self) -> usize {
        self.0 as usize
    }
    fn schedule(&self, task: fn(usize), argument: usize) {
        task(argument);
    }
}

/// Keeps every task until [`DeferredPool::run_all`], after the handler has returned.
#[derive(Default)]
pub struct DeferredPool(Mutex<Vec<Task>>);

impl DeferredPool {
    /// Runs all tasks. Returns their number.
    pub fn run_all(&self) -> usize {
        let tasks = std::mem::take(&mut *self.0.lock().unwrap());
        let count = tasks.len();
        tasks.into_iter().for_each(Task::run);
        count
    }
}

impl HostPool for DeferredPool {
    fn num_threads(&self) -> Option<i64> {
        Some(4)
    }
    fn schedule(&self, task: Task) -> Result<(), Task> {
        self.0.lock().unwrap().push(task);
        Ok(())
    }
}

/// A context without a pool.
pub struct NoPool;

impl HostPool for NoPool {
    fn num_threads(&self) -> Option<i64> {
        None
    }
    fn schedule(&self, task: Task) -> Result<(), Task> {
        Err(task)
    }
}

/// A pool with threads.
pub struct ThreadPool {
    queue: Option<Sender<Task>>,
    workers: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    pub fn new(count: usize) -> Self {
        let (queue, tasks) = channel::<Task>();
        let tasks = Arc::new(Mutex::new(tasks));
        let workers = (0..count)
            .map(|_| {
                let tasks = Arc::clone(&tasks);
                std::thread::spawn(move || {
                    loop {
                        let task = tasks.lock().unwrap().recv();
                        let Ok(task) = task else { return };
                        task.run();
                    }
                })
            })
            .collect();
        Self { queue: Some(queue), workers }
    }
}

impl HostPool for ThreadPool {
    fn num_threads(&self) -> Option<i64> {
        Some(self.workers.len() as i64)
    }
    fn schedule(&self, task: Task) -> Result<(), Task> {
        self.queue.as_ref().unwrap().send(task).map_err(|e| e.0)
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        drop(self.queue.take());
        for worker in self.workers.drain(..) {
            worker.join().unwrap();
        }
    }
}

/// Calls `work` with each kind of pool. The last one runs its tasks after the call has returned and its memory is
/// freed.
pub fn for_each_pool(mut work: impl FnMut(&dyn HostPool)) {
    let late = DeferredPool::default();
    for pool in [&InlinePool(1) as &dyn HostPool, &InlinePool(3), &InlinePool(64), &ThreadPool::new(3), &NoPool, &late]
    {
        work(pool);
    }
    late.run_all();
}
