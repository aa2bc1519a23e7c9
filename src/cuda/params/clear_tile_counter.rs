//! The parameter of `clear_tile_counter`.

/// Threads of the CTA, at most.
pub const CLEAR_THREADS: i32 = 128;

/// Clears the tile counter of the kernel that is launched after it, and the counters that follow it.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ClearTileCounterParams {
    pub next_tile: *mut u64,
    pub count: i32,
    pub reserved: i32,
}
