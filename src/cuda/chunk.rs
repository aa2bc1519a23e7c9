//! How the kernels for rows take them: a chunk of neighbouring elements a thread (`kernels/include/chunk.cuh`).

/// Bytes of a chunk of rows that are aligned to it.
pub(super) const CHUNK: usize = 16;

/// All of these byte addresses and distances are multiples of `bytes`.
pub(super) fn aligned_to(bytes: usize, places: &[i64]) -> bool {
    places.iter().all(|place| place % bytes as i64 == 0)
}
