//! `gather_kv_cache`.

/// Threads per CTA.
pub const GATHER_THREADS: u32 = 256;

/// Sequences whose starts a CTA finds at once.
pub const GATHER_SEQS: u32 = 1024;

/// What a cache holds, if not elements of the results' type.
#[derive(Clone, Copy)]
#[repr(i32)]
pub enum Codes {
    None,
    F8E4M3Fn,
    F8E5M2,
}

/// K or V: where rows lie and where they go. Strides are in bytes; the elements of a head are contiguous.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct GatheredRows {
    pub cache: *const u8,
    pub page_stride: i64,
    pub token_stride: i64,
    pub head_stride: i64,
    /// `[N, Hkv, D]`
    pub rows: *mut u8,
    /// Multiplies them; null for 1.
    pub scale: *const f32,
    /// 0 for one scale, 1 for one per head.
    pub scale_stride: i64,
    /// Pieces per head and per row.
    pub head_pieces: u32,
    pub row_pieces: u32,
    /// Pieces after which those of the other, K or V, follow: of a head where the two take turns, else of a row.
    pub group_pieces: u32,
}

/// The parameter of `gather_kv_cache`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct GatherParams {
    pub keys: GatheredRows,
    pub values: GatheredRows,
    /// `[S, M]`
    pub table: *const i32,
    pub table_stride: i64,
    /// `[S]`
    pub context_lens: *const i32,
    /// `[S+1]`
    pub cu_seqlens: *mut i32,
    pub num_seqs: i32,
    /// N
    pub capacity: i32,
    /// Tokens that a row of the table can name.
    pub longest: i32,
    pub page_size: i32,
    pub num_pages: i32,
    /// Rows per CTA.
    pub cta_rows: i32,
    pub codes: Codes,
    /// Elements per piece, which a thread copies at once: 16 bytes of the results, also 8 of what is copied bit by bit, or 1
    /// element where something is not aligned.
    pub piece: i32,
}
