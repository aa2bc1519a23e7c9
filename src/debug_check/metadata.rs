//! Validates the metadata of a call on the host: values that a normal call clamps or skips are errors here.
//!
//! A slot of -1 is valid, because it marks a padding row. A `seqused` that is longer than its sequence is valid too,
//! because the smaller of the two counts (`docs/semantics.md#metadata`).

use crate::error::{Error, Result, ensure};
use crate::problem::attention::{Attention, KeyStorage, PageTable};
use crate::problem::gather_kv_cache::GatherKvCache;
use crate::problem::kv_cache_update::KvCacheUpdate;
use crate::problem::rope_kv_cache_update::RopeKvCacheUpdate;
use crate::tensor::DType;
use std::collections::HashMap;

/// The operands that hold the metadata of attention, by the names of an operator.
pub(crate) struct Names {
    query_starts: &'static str,
    query_lengths: &'static str,
    key_starts: &'static str,
    key_lengths: &'static str,
    leftpad: &'static str,
    table: &'static str,
    num_seqs: &'static str,
}

pub(crate) const PAGED_ATTENTION: Names = Names {
    query_starts: "query_start_loc",
    query_lengths: "",
    key_starts: "",
    key_lengths: "context_lens",
    leftpad: "",
    table: "block_tables",
    num_seqs: "num_seqs",
};

pub(crate) const FLASH_ATTN_VARLEN: Names = Names {
    query_starts: "cu_seqlens_q",
    query_lengths: "seqused_q",
    key_starts: "cu_seqlens_k",
    key_lengths: "seqused_k",
    leftpad: "leftpad_k",
    table: "block_table",
    num_seqs: "",
};

pub(crate) const MLA_PAGED_ATTENTION: Names = Names {
    query_starts: "cu_seqlens_q",
    query_lengths: "",
    key_starts: "",
    key_lengths: "seqused_k",
    leftpad: "",
    table: "block_table",
    num_seqs: "num_seqs",
};

/// A sequence with valid metadata.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequence {
    /// Its index in the metadata.
    pub(super) index: usize,
    pub(super) first_row: usize,
    pub(super) len_q: usize,
    /// The row of its first key, for contiguous keys.
    pub(super) first_key: usize,
    pub(super) len_k: usize,
    pub(super) leftpad: usize,
    /// The entry of `q_offset`, which may be any number.
    pub(super) offset: Option<i32>,
}

/// Validates the metadata of an attention call and returns its sequences.
///
/// # Errors
/// `INVALID_ARGUMENT`, with the operand, the entry and the sequence.
///
/// # Safety
/// The problem's metadata is readable host memory.
pub(crate) unsafe fn attention(problem: &Attention, names: &Names) -> Result<Vec<Sequence>> {
    let slots = problem.max_seqs;
    // SAFETY: `num_seqs` has one element.
    let given = problem.queries.num_seqs.map(|n| unsafe { n.read() });
    let count = given.map_or(Ok(slots), |n| {
        let count = usize::try_from(n).ok().filter(|n| *n <= slots);
        count.ok_or_else(|| Error::invalid(format!("{} is {n}, expected 0 to {slots}", names.num_seqs)))
    })?;
    // SAFETY: `count` is at most B.
    (0..count).map(|b| unsafe { sequence(problem, names, b) }).collect()
}

/// Validates the metadata of sequence `b`.
///
/// # Safety
/// As [`attention`], and `b` is below B.
unsafe fn sequence(problem: &Attention, names: &Names, b: usize) -> Result<Sequence> {
    let (queries, keys) = (&problem.queries, &problem.keys);
    // SAFETY: the optional arrays have B elements.
    let entry = |array: Option<*const i32>| array.map(|array| unsafe { array.add(b).read() });
    // SAFETY: the starts have B+1 elements.
    let rows = unsafe { slot(names.query_starts, queries.starts, b, problem.num_rows) }?;
    let used = |name: &str, given: Option<i32>| {
        ensure(given.is_none_or(|n| n >= 0), || {
            format!("{name}[{b}] is {} (sequence {b}), expected a length", given.unwrap_or_default())
        })?;
        Ok::<Option<usize>, Error>(given.map(|n| n as usize))
    };
    let len_q = used(names.query_lengths, entry(queries.used))?.map_or(rows.1, |n| n.min(rows.1));
    let len_used = used(names.key_lengths, entry(keys.used))?;
    let (first_key, len_k) = match keys.storage {
        KeyStorage::Contiguous { total } => {
            let starts = keys.starts.unwrap_or(std::ptr::null());
            // SAFETY: contiguous keys always have B+1 starts.
            let (first, stored) = unsafe { slot(names.key_starts, starts, b, total) }?;
            (first, len_used.map_or(stored, |n| n.min(stored)))
        }
        KeyStorage::Paged(table) => {
            let (name, length) = match (len_used, keys.starts) {
                (Some(length), _) => (format!("{}[{b}]", names.key_lengths), i64::try_from(length).unwrap_or(i64::MAX)),
                (None, Some(starts)) => {
                    // SAFETY: the starts have B+1 elements.
                    let (start, end) = unsafe { (starts.add(b).read(), starts.add(b + 1).read()) };
                    (format!("{0}[{1}] - {0}[{b}]", names.key_starts, b + 1), i64::from(end) - i64::from(start))
                }
                (None, None) => (String::new(), 0),
            };
            ensure((0..=table.capacity() as i64).contains(&length), || {
                let (capacity, pages) = (table.capacity(), table.num_pages);
                format!(
                    "{name} is {length} (sequence {b}), expected 0 to {capacity}: {} entries of {}, over {pages} pages \
                     of {} tokens",
                    table.max_pages, names.table, table.page_size
                )
            })?;
            if len_q > 0 {
                // SAFETY: `length` is at most the capacity of a row of the table.
                unsafe { pages(&table, names.table, b, length as usize) }?;
            }
            (0, length as usize)
        }
    };
    let leftpad = used(names.leftpad, entry(keys.leftpad))?.unwrap_or(0);
    ensure(leftpad <= len_k, || {
        format!("{}[{b}] is {leftpad} (sequence {b}), expected 0 to its {len_k} keys", names.leftpad)
    })?;
    Ok(Sequence { index: b, first_row: rows.0, len_q, first_key, len_k, leftpad, offset: entry(queries.offset) })
}

/// Validates the start and end of sequence b; returns its first row and its number of rows.
///
/// # Safety
/// Elements b and b+1 of `starts` are readable.
unsafe fn slot(name: &str, starts: *const i32, b: usize, total: usize) -> Result<(usize, usize)> {
    // SAFETY: the caller guarantees elements b and b+1.
    let (start, end) = unsafe { (starts.add(b).read(), starts.add(b + 1).read()) };
    let within = |n: i32| usize::try_from(n).is_ok_and(|n| n <= total);
    for (at, given) in [(b, start), (b + 1, end)] {
        ensure(within(given), || format!("{name}[{at}] is {given} (sequence {b}), expected 0 to {total} rows"))?;
    }
    ensure(start <= end, || format!("{name}[{}] is {end} (sequence {b}), less than {name}[{b}], {start}", b + 1))?;
    Ok((start as usize, (end - start) as usize))
}

/// Validates the entries of row b that a sequence of `len_k` keys reads.
///
/// # Safety
/// Row b of the table is readable as far as `len_k` keys reach.
unsafe fn pages(table: &PageTable, name: &str, b: usize, len_k: usize) -> Result {
    for entry in 0..len_k.div_ceil(table.page_size) {
        // SAFETY: the caller guarantees the entries that `len_k` keys need.
        let page = unsafe { table.entries.offset(b as isize * table.stride as isize).add(entry).read() };
        ensure(usize::try_from(page).is_ok_and(|page| page < table.num_pages), || {
            format!(
                "{name}[{b}, {entry}] is {page} (sequence {b}), expected a page, 0 to {}",
                table.num_pages as i64 - 1
            )
        })?;
    }
    Ok(())
}

/// Validates the lengths and pages of `gather_kv_cache`, and that the results hold all tokens.
///
/// # Errors
/// `INVALID_ARGUMENT`, with the entry.
///
/// # Safety
/// The problem's lengths and table are readable host memory.
pub(crate) unsafe fn gathered(problem: &GatherKvCache) -> Result {
    let (table, mut total) = (&problem.table, 0);
    for b in 0..problem.num_seqs {
        // SAFETY: `context_lens` has S elements.
        let len = unsafe { problem.context_lens.add(b).read() };
        ensure(usize::try_from(len).is_ok_and(|len| len <= table.capacity()), || {
            let (longest, size) = (table.capacity(), table.page_size);
            format!(
                "context_lens[{b}] is {len} (sequence {b}), expected 0 to {longest}: {} entries of {}, over {} pages of \
                 {size} tokens",
                table.max_pages, PAGED_ATTENTION.table, table.num_pages
            )
        })?;
        // SAFETY: `len` is at most the capacity of a row of the table.
        unsafe { pages(table, PAGED_ATTENTION.table, b, len as usize) }?;
        total += len as usize;
    }
    ensure(total <= problem.capacity, || {
        format!("context_lens are {total} tokens, and the results have room for {}", problem.capacity)
    })
}

/// Validates that the slots of an update lie in the cache and are distinct.
///
/// # Errors
/// `INVALID_ARGUMENT`, with the entry.
///
/// # Safety
/// The problem's slots are readable host memory.
pub(crate) unsafe fn slots(problem: &KvCacheUpdate) -> Result {
    let total = (problem.num_pages * problem.page_size) as i64;
    let mut taken = HashMap::new();
    for t in 0..problem.slot_mapping.len() {
        // SAFETY: the caller guarantees readable slots, and t is below their number.
        let slot = unsafe { slot_of(problem, t) };
        if slot == -1 {
            continue;
        }
        ensure((0..total).contains(&slot), || {
            format!("slot_mapping[{t}] is {slot}, expected a slot, 0 to {}, or -1 for none", total - 1)
        })?;
        if let Some(before) = taken.insert(slot, t) {
            return Err(Error::invalid(format!("slot_mapping[{t}] is {slot}, as slot_mapping[{before}]")));
        }
    }
    Ok(())
}

/// Validates the slots ([`slots`]) and that the positions are rows of `cos_sin`.
///
/// # Errors
/// As [`slots`].
///
/// # Safety
/// The problem's slots and positions are readable host memory.
pub(crate) unsafe fn positions(problem: &RopeKvCacheUpdate) -> Result {
    // SAFETY: the caller guarantees readable slots.
    unsafe { slots(&problem.update) }?;
    let rotation = &problem.rotation;
    for t in 0..problem.update.slot_mapping.len() {
        // SAFETY: the caller guarantees readable slots and positions, and t is below their number.
        let (position, slot) = unsafe { (rotation.positions.add(t).read(), slot_of(&problem.update, t)) };
        let known = usize::try_from(position).is_ok_and(|position| position < rotation.max_pos);
        // A padding row has no position, and an empty table rotates nothing.
        ensure(known || slot == -1 || rotation.max_pos == 0, || {
            format!("positions[{t}] is {position}, expected 0 to {}, the rows of cos_sin", rotation.max_pos - 1)
        })?;
    }
    Ok(())
}

/// Validates slots and metadata of attention over an updated cache, and that each new token's slot is the place that the
/// page table gives for its key. Returns the sequences.
///
/// # Errors
/// As [`slots`] and [`attention`].
///
/// # Safety
/// The update's slots and the attention's metadata are readable host memory.
pub(crate) unsafe fn new_tokens(update: &KvCacheUpdate, problem: &Attention, names: &Names) -> Result<Vec<Sequence>> {
    // SAFETY: the caller guarantees readable slots and metadata.
    let sequences = unsafe {
        slots(update)?;
        attention(problem, names)?
    };
    let KeyStorage::Paged(table) = problem.keys.storage else { return Ok(sequences) };
    for sequence in &sequences {
        let Sequence { index: b, first_row, len_q, len_k, .. } = *sequence;
        for i in 0..len_q {
            // If a sequence has more rows than keys, its first rows have no key.
            let Some(key) = (i + len_k).checked_sub(len_q) else { continue };
            let entry = b as isize * table.stride as isize + (key / table.page_size) as isize;
            // SAFETY: the key is below `len_k`, whose pages `attention` has validated, and the row is the sequence's.
            let (page, slot) = unsafe { (table.entries.offset(entry).read(), slot_of(update, first_row + i)) };
            let place = i64::from(page) * table.page_size as i64 + (key % table.page_size) as i64;
            ensure(slot == place, || {
                let name = names.table;
                format!(
                    "slot_mapping[{}] is {slot}, expected {place}, where {name} has key {key} of sequence {b}",
                    first_row + i
                )
            })?;
        }
    }
    Ok(sequences)
}

/// Slot `t` of an update.
///
/// # Safety
/// The problem's slots are readable host memory, and `t` is below their number.
unsafe fn slot_of(problem: &KvCacheUpdate, t: usize) -> i64 {
    let slots = &problem.slot_mapping;
    // SAFETY: the caller guarantees a readable slot; `problem` has validated that the dtype is i32 or i64.
    unsafe {
        match slots.dtype {
            DType::I32 => i64::from(slots.data.cast::<i32>().add(t).read()),
            _ => slots.data.cast::<i64>().add(t).read(),
        }
    }
}
