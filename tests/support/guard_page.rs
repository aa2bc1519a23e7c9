//! Buffers between guard pages, so that an access one byte outside faults.
//!
//! A buffer lies between two `PROT_NONE` pages and touches one of them: the page after it ([`Side::EndsAtGuard`]) or
//! the page before it ([`Side::BeginsAtGuard`]). The rest of its own pages is filled with a known byte and compared
//! afterwards. A buffer that ends at the guard page is aligned to its element size only.

use super::on_emulator;
use std::cell::RefCell;
use std::collections::HashMap;
use std::io::Write;
use std::ptr::null_mut;
use std::sync::{Mutex, Once, OnceLock};

/// Which end of a buffer touches a guard page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The byte after the last one faults.
    EndsAtGuard,
    /// The byte before the first one faults.
    BeginsAtGuard,
}

/// Calls `work` for buffers that end at the guard page, then for buffers that begin at one. On the emulator, where a call may take a
/// second, it does only the latter, whose buffers have redzones there.
pub fn for_each_side(mut work: impl FnMut(Side)) {
    if !on_emulator() {
        work(Side::EndsAtGuard);
    }
    work(Side::BeginsAtGuard);
}

/// The byte in the unused part of a buffer's pages.
const SLACK: u8 = 0x5a;

/// A buffer between guard pages. Handlers may write to it through [`GuardedBuffer::data`].
pub struct GuardedBuffer {
    name: String,
    map: *mut u8,
    map_len: usize,
    inner_len: usize,
    data: *mut u8,
    len: usize,
}

// SAFETY: the buffer owns its mapping. Concurrent access is as sound as for any memory that XLA passes to a handler.
unsafe impl Send for GuardedBuffer {}
// SAFETY: as for `Send`.
unsafe impl Sync for GuardedBuffer {}

impl GuardedBuffer {
    /// A copy of `bytes`. `name` appears in the report of a page fault.
    pub fn new(name: &str, side: Side, bytes: &[u8]) -> Self {
        report_page_faults();
        let page = page_size();
        let inner_len = bytes.len().next_multiple_of(page);
        let map_len = inner_len + 2 * page;
        let map = take_kept(inner_len).unwrap_or_else(|| map_guarded(inner_len, page));
        let offset = if side == Side::EndsAtGuard { inner_len - bytes.len() } else { 0 };
        // SAFETY: the map has `inner_len` writable bytes after its first page, and the buffer lies within them at
        // `offset`.
        let data = unsafe {
            let inner = map.add(page);
            inner.write_bytes(SLACK, inner_len);
            inner.add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            inner.add(offset)
        };
        let buffer = Self { name: name.to_owned(), map, map_len, inner_len, data, len: bytes.len() };
        REGIONS.lock().unwrap().push(Region {
            map: map as usize..map as usize + map_len,
            data: data as usize..data as usize + bytes.len(),
            name: name.to_owned(),
        });
        buffer
    }

    /// The address of the first byte. The address of an empty buffer is in a guard page.
    pub fn data(&self) -> *mut u8 {
        self.data
    }

    /// The contents.
    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: the buffer has `len` readable bytes, and handlers have stopped to write when they return.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }.to_vec()
    }

    /// Asserts that no byte around the buffer has changed.
    pub fn assert_slack_untouched(&self) {
        // SAFETY: the inner pages are readable.
        let inner = unsafe { std::slice::from_raw_parts(self.map.add(page_size()), self.inner_len) };
        let begin = self.data as usize - inner.as_ptr() as usize;
        let wrong = |bytes: &[u8]| bytes.iter().any(|&b| b != SLACK);
        if wrong(&inner[..begin]) || wrong(&inner[begin + self.len..]) {
            let outside = |i: &usize| !(begin..begin + self.len).contains(i) && inner[*i] != SLACK;
            let at = (0..inner.len()).find(outside).unwrap();
            panic!("{}: byte {} of {} was written", self.name, at as i64 - begin as i64, self.len);
        }
    }
}

impl Drop for GuardedBuffer {
    fn drop(&mut self) {
        if let Ok(mut regions) = REGIONS.lock() {
            regions.retain(|r| r.map.start != self.map as usize);
        }
        if !keep(self.inner_len, self.map) {
            // SAFETY: this is the mapping of `new`, and nothing borrows from it.
            unsafe { libc::munmap(self.map.cast(), self.map_len) };
        }
    }
}

/// Maps `inner_len` writable bytes between two guard pages.
fn map_guarded(inner_len: usize, page: usize) -> *mut u8 {
    let map_len = inner_len + 2 * page;
    // SAFETY: a new private mapping, of which only the inner pages become accessible.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let map = libc::mmap(null_mut(), map_len, libc::PROT_NONE, flags, -1, 0);
        assert_ne!(map, libc::MAP_FAILED, "mmap of {map_len} bytes: {}", std::io::Error::last_os_error());
        if inner_len > 0 {
            let opened = libc::mprotect(map.byte_add(page), inner_len, libc::PROT_READ | libc::PROT_WRITE);
            assert_eq!(opened, 0, "mprotect: {}", std::io::Error::last_os_error());
        }
        map.cast::<u8>()
    }
}

/// Mappings, by the length of their inner pages.
type Mappings = HashMap<usize, Vec<*mut u8>>;

thread_local! {
    static KEPT: RefCell<Option<Mappings>> = const { RefCell::new(None) };
}

/// Lets later buffers of this thread reuse mappings, which takes a tenth of the time. Accesses to a dropped buffer are
/// then no longer detected.
pub fn keep_mappings() {
    KEPT.with_borrow_mut(|kept| {
        kept.get_or_insert_default();
    });
}

fn take_kept(inner_len: usize) -> Option<*mut u8> {
    KEPT.with_borrow_mut(|kept| kept.as_mut()?.get_mut(&inner_len)?.pop())
}

/// Keeps the mapping for another buffer, if this thread reuses mappings.
fn keep(inner_len: usize, map: *mut u8) -> bool {
    let keep =
        |kept: &mut Option<Mappings>| kept.as_mut().map(|kept| kept.entry(inner_len).or_default().push(map)).is_some();
    // The table of a thread that ends is already gone.
    KEPT.try_with(|kept| keep(&mut kept.borrow_mut())).unwrap_or(false)
}

fn page_size() -> usize {
    // SAFETY: `sysconf` with this name accesses no memory of ours.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

struct Region {
    map: std::ops::Range<usize>,
    data: std::ops::Range<usize>,
    name: String,
}

static REGIONS: Mutex<Vec<Region>> = Mutex::new(Vec::new());
static RUNNING: Mutex<String> = Mutex::new(String::new());

/// Sets what the report of a page fault names as the running call.
pub fn announce(description: &str) {
    description.clone_into(&mut RUNNING.lock().unwrap());
}

const PAGE_FAULT_SIGNALS: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// Installs a handler of page faults that reports the buffer and the running call, and then leaves the fault to the
/// earlier handler: Rust's, which ends the process, or a fuzzer's, which first stores its input.
fn report_page_faults() {
    static BEFORE: [OnceLock<libc::sigaction>; PAGE_FAULT_SIGNALS.len()] =
        [const { OnceLock::new() }; PAGE_FAULT_SIGNALS.len()];
    static ONCE: Once = Once::new();
    extern "C" fn on_page_fault(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        let before = PAGE_FAULT_SIGNALS
            .iter()
            .zip(&BEFORE)
            .find(|(fault, _)| **fault == signal)
            .and_then(|(_, before)| before.get());
        // SAFETY: the kernel passes a valid siginfo, and the earlier action was one of this process.
        let address = unsafe {
            libc::sigaction(signal, before.map_or(std::ptr::null(), std::ptr::from_ref), null_mut());
            (*info).si_addr() as usize
        };
        let mut text = [0u8; 600];
        let mut rest = &mut text[..];
        // A signal handler must not allocate or block, since the fault may have occurred anywhere.
        if let Ok(regions) = REGIONS.try_lock() {
            if let Some(r) = regions.iter().find(|r| r.map.contains(&address)) {
                let (offset, len) = (address as i64 - r.data.start as i64, r.data.len());
                let _ = writeln!(rest, "access to byte {offset} of {}, which has {len} bytes", r.name);
            } else {
                let _ = writeln!(rest, "access to {address:#x}, in no buffer of the test");
            }
        }
        if let Ok(running) = RUNNING.try_lock() {
            let _ = writeln!(rest, "while running {running}");
        }
        let unused = rest.len();
        // SAFETY: `text` outlives the call.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len() - unused) };
    }
    ONCE.call_once(|| {
        // SAFETY: a zeroed sigaction has an empty mask, and the handler has the signature that SA_SIGINFO requires.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_page_fault as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            for (&signal, before) in PAGE_FAULT_SIGNALS.iter().zip(&BEFORE) {
                let mut known = std::mem::zeroed();
                libc::sigaction(signal, std::ptr::null(), &raw mut known);
                let _ = before.set(known);
                libc::sigaction(signal, &raw const action, null_mut());
            }
        }
    });
}
