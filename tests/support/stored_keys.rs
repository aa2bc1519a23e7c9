//! Keys and values in memory: rows of packed sequences, or pages. What no query attends to holds NaN or infinities.

use super::{
    Array, AttentionConfig, Batch, F32, KvGeometry, MemoryLayout, Random, SequenceData, poisoned, put, put_quantized,
};

/// Keys and values of a batch in their buffers, and where those of each sequence are.
pub(super) struct StoredKeys {
    pub(super) kv_geometry: KvGeometry,
    pub(super) kv: Vec<Array>,
    pub(super) scale_cache: Option<Array>,
    pub(super) starts: Vec<i32>,
    pub(super) max_pages: usize,
    pub(super) block_table: Vec<i32>,
}

/// Stores the keys and values of `batch` as `memory_layout` says.
pub(super) fn store_keys(batch: &Batch, memory_layout: &MemoryLayout, random: &mut Random) -> StoredKeys {
    if memory_layout.is_paged() {
        store_pages(batch, memory_layout, random)
    } else {
        store_rows(batch, memory_layout, random)
    }
}

fn buffers(kv_geometry: &KvGeometry, config: &AttentionConfig, random: &mut Random) -> Vec<Array> {
    kv_geometry.shapes().iter().map(|dims| poisoned(random, config.dtypes.kv, dims)).collect()
}

/// Writes the keys and values that a query attends to. `position(j)` is (page, token) of key j.
fn put_sequence(
    (kv, mut scale_cache): (&mut [Array], Option<&mut Array>),
    kv_geometry: &KvGeometry,
    sequence: &SequenceData,
    visible_keys: &[bool],
    position: impl Fn(usize) -> (usize, usize),
) {
    for j in (0..sequence.len_k).filter(|&j| visible_keys[j]) {
        let (page, token) = position(j);
        for head in 0..kv_geometry.kv_heads {
            for (value, rows) in [&sequence.k, &sequence.v].into_iter().enumerate() {
                let (buffer, at) = kv_geometry.element(value, page, token, head);
                let d = kv_geometry.dims[value];
                let row = &rows[(j * kv_geometry.kv_heads + head) * d..][..d];
                match &mut scale_cache {
                    Some(scales) => put_quantized(&mut kv[buffer], scales, at, row),
                    None => put(&mut kv[buffer], at, row),
                }
            }
        }
    }
}

fn store_rows(batch: &Batch, memory_layout: &MemoryLayout, random: &mut Random) -> StoredKeys {
    let mut unused_rows = || if memory_layout.seqused_k { random.below(4) } else { 0 };
    let slots: Vec<usize> = batch.sequences.iter().map(|s| s.len_k + unused_rows()).collect();
    let before = memory_layout.spare_pages.div_ceil(2);
    let rows = memory_layout.spare_pages + slots.iter().sum::<usize>();
    let kv_geometry = memory_layout.kv_geometry(&batch.config, rows);
    let mut kv = buffers(&kv_geometry, &batch.config, random);
    let mut starts = vec![before as i32];
    let mut at = before;
    for (sequence, slot) in batch.sequences.iter().zip(slots) {
        put_sequence((&mut kv, None), &kv_geometry, sequence, &batch.visible_keys(sequence), |j| (at + j, 0));
        at += slot;
        starts.push(at as i32);
    }
    starts.extend((0..memory_layout.spare_seqs).map(|_| random.hostile_i32()));
    StoredKeys { kv_geometry, kv, scale_cache: None, starts, max_pages: 0, block_table: Vec::new() }
}

fn store_pages(batch: &Batch, memory_layout: &MemoryLayout, random: &mut Random) -> StoredKeys {
    let page_size = memory_layout.page_size;
    let pages_of = |s: &SequenceData| s.len_k.div_ceil(page_size);
    let max_pages = batch.sequences.iter().map(pages_of).max().unwrap_or(0) + memory_layout.spare_entries;
    let num_pages = batch.sequences.iter().map(pages_of).sum::<usize>() + memory_layout.spare_pages;
    let slots = batch.sequences.len() + memory_layout.spare_seqs;
    let kv_geometry = memory_layout.kv_geometry(&batch.config, num_pages);
    let mut kv = buffers(&kv_geometry, &batch.config, random);
    // The scales of rows that no query attends to are NaN and infinities.
    let scaled = batch.config.dtypes.scaled;
    let mut scale_cache = scaled.then(|| poisoned(random, F32, &kv_geometry.scale_dims()));
    let mut block_table: Vec<i32> = (0..slots * max_pages).map(|_| random.hostile_i32()).collect();
    let mut free: Vec<usize> = (0..num_pages).collect();
    random.shuffle(&mut free);
    for (sequence, table) in batch.sequences.iter().zip(block_table.chunks_exact_mut(max_pages.max(1))) {
        let pages: Vec<usize> = free.drain(free.len() - pages_of(sequence)..).collect();
        let visible_keys = batch.visible_keys(sequence);
        let to = (kv.as_mut_slice(), scale_cache.as_mut());
        put_sequence(to, &kv_geometry, sequence, &visible_keys, |j| (pages[j / page_size], j % page_size));
        for (index, entry) in table.iter_mut().take(pages.len()).enumerate() {
            let end = visible_keys.len().min((index + 1) * page_size);
            // A server that reuses pages behind the sliding window leaves table entries that point at data of another
            // sequence.
            // An update stores the last tokens, also those to which no query attends.
            let is_new = end > sequence.len_k.saturating_sub(sequence.len_q);
            let is_read = free.is_empty() || is_new || visible_keys[index * page_size..end].contains(&true);
            *entry = if is_read { pages[index] } else { free[0] } as i32;
        }
    }
    let starts =
        if memory_layout.seqused_k { unread_starts(random) } else { differences(batch, memory_layout, random) };
    StoredKeys { kv_geometry, kv, scale_cache, starts, max_pages, block_table }
}

/// `cu_seqlens_k` where the operator does not read it: any length and any numbers.
fn unread_starts(random: &mut Random) -> Vec<i32> {
    (0..random.below(6)).map(|_| random.hostile_i32()).collect()
}

/// `cu_seqlens_k` of a paged cache, of which only the differences matter.
fn differences(batch: &Batch, memory_layout: &MemoryLayout, random: &mut Random) -> Vec<i32> {
    let mut starts = vec![random.one_of(&[0, 0, 7, -1_000_000, 2_000_000_000, i32::MIN])];
    for sequence in &batch.sequences {
        starts.push(starts.last().unwrap() + sequence.len_k as i32);
    }
    starts.extend((0..memory_layout.spare_seqs).map(|_| random.hostile_i32()));
    starts
}
