//! Memory that faults one byte outside a buffer.
//!
//! A buffer lies between two `PROT_NONE` pages and touches one of them: the page after it ([`Side::EndsAtGuard`]) or the
//! page before it ([`Side::BeginsAtGuard`]). What is left of its own pages is filled with a known byte and checked.
//! Buffers are aligned to their element only when they end at the guard, which kernels have to live with.

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

/// Run `check` with buffers that touch the guard at their end, then at their beginning.
pub fn for_both_sides(mut check: impl FnMut(Side)) {
    check(Side::EndsAtGuard);
    check(Side::BeginsAtGuard);
}

/// Fills the rest of a buffer's pages.
const SLACK: u8 = 0x5a;

/// A buffer between guard pages. Shared freely: handlers write through [`GuardedBuffer::data`].
pub struct GuardedBuffer {
    name: String,
    map: *mut u8,
    map_len: usize,
    inner_len: usize,
    data: *mut u8,
    len: usize,
}

// SAFETY: an owned mapping; concurrent access is as sound as for any raw memory that XLA hands out.
unsafe impl Send for GuardedBuffer {}
// SAFETY: as above.
unsafe impl Sync for GuardedBuffer {}

impl GuardedBuffer {
    /// A copy of `bytes`; `name` appears in the report of a fault.
    pub fn new(name: &str, side: Side, bytes: &[u8]) -> Self {
        report_faults();
        let page = page_size();
        let inner_len = bytes.len().next_multiple_of(page);
        let map_len = inner_len + 2 * page;
        let map = kept(inner_len).unwrap_or_else(|| fresh(inner_len, page));
        let offset = if side == Side::EndsAtGuard { inner_len - bytes.len() } else { 0 };
        // SAFETY: `inner_len` writable bytes begin one page into the map, `bytes.len()` of them at `offset`.
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

    /// First byte; points into a guard page if the buffer is empty.
    pub fn data(&self) -> *mut u8 {
        self.data
    }

    /// What the buffer holds.
    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: `len` readable bytes; a handler that still writes has broken its contract.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }.to_vec()
    }

    /// No byte of the buffer's pages outside the buffer has changed.
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
            // SAFETY: the mapping made in `new`; nothing borrows from it.
            unsafe { libc::munmap(self.map.cast(), self.map_len) };
        }
    }
}

/// `inner_len` writable bytes between two pages that fault.
fn fresh(inner_len: usize, page: usize) -> *mut u8 {
    let map_len = inner_len + 2 * page;
    // SAFETY: a fresh private mapping, then access to its inner pages only.
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

/// Mappings by the length of their inner pages.
type Mappings = HashMap<usize, Vec<*mut u8>>;

thread_local! {
    static KEPT: RefCell<Option<Mappings>> = const { RefCell::new(None) };
}

/// From now on buffers of this thread use the mappings of earlier ones, which takes a tenth of the time. An access to a
/// buffer that is gone is then no longer found.
pub fn keep_mappings() {
    KEPT.with_borrow_mut(|kept| {
        kept.get_or_insert_default();
    });
}

fn kept(inner_len: usize) -> Option<*mut u8> {
    KEPT.with_borrow_mut(|kept| kept.as_mut()?.get_mut(&inner_len)?.pop())
}

/// Whether the mapping is kept for another buffer.
fn keep(inner_len: usize, map: *mut u8) -> bool {
    let keep =
        |kept: &mut Option<Mappings>| kept.as_mut().map(|kept| kept.entry(inner_len).or_default().push(map)).is_some();
    // A thread that ends has no table any more.
    KEPT.try_with(|kept| keep(&mut kept.borrow_mut())).unwrap_or(false)
}

fn page_size() -> usize {
    // SAFETY: a query without arguments in memory.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

struct Region {
    map: std::ops::Range<usize>,
    data: std::ops::Range<usize>,
    name: String,
}

static REGIONS: Mutex<Vec<Region>> = Mutex::new(Vec::new());
static DOING: Mutex<String> = Mutex::new(String::new());

/// Says what runs next, for the report of a fault.
pub fn announce(what: &str) {
    what.clone_into(&mut DOING.lock().unwrap());
}

const FAULTS: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// On a fault, say which buffer was overrun and in which case, then leave it to whatever handled faults before: Rust, which
/// dies of it, or a fuzzer, which first writes its input to a file.
fn report_faults() {
    static BEFORE: [OnceLock<libc::sigaction>; FAULTS.len()] = [const { OnceLock::new() }; FAULTS.len()];
    static ONCE: Once = Once::new();
    extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        let before =
            FAULTS.iter().zip(&BEFORE).find(|(fault, _)| **fault == signal).and_then(|(_, before)| before.get());
        // SAFETY: the kernel passes a valid siginfo; the earlier action, if any, was one of this process.
        let address = unsafe {
            libc::sigaction(signal, before.map_or(std::ptr::null(), std::ptr::from_ref), null_mut());
            (*info).si_addr() as usize
        };
        let mut text = [0u8; 600];
        let mut rest = &mut text[..];
        // No allocation and no waiting here: the fault may have come from anywhere.
        if let Ok(regions) = REGIONS.try_lock() {
            if let Some(r) = regions.iter().find(|r| r.map.contains(&address)) {
                let (offset, len) = (address as i64 - r.data.start as i64, r.data.len());
                let _ = writeln!(rest, "access to byte {offset} of {}, which has {len} bytes", r.name);
            } else {
                let _ = writeln!(rest, "access to {address:#x}, in no buffer of the test");
            }
        }
        if let Ok(doing) = DOING.try_lock() {
            let _ = writeln!(rest, "while running {doing}");
        }
        let unused = rest.len();
        // SAFETY: `text` outlives the call.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len() - unused) };
    }
    ONCE.call_once(|| {
        // SAFETY: a zeroed sigaction is an empty mask; the handler has the SA_SIGINFO signature.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_fault as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            for (&signal, before) in FAULTS.iter().zip(&BEFORE) {
                let mut known = std::mem::zeroed();
                libc::sigaction(signal, std::ptr::null(), &raw mut known);
                let _ = before.set(known);
                libc::sigaction(signal, &raw const action, null_mut());
            }
        }
    });
}
