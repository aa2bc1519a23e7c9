//! Trees of query rows: `tree_mask`.

use crate::problem::attention::TreeMask;

/// The tree of a sequence: which of its newest keys, those of its own query rows, each query attends to.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct RowTree {
    /// The words of query 0; `None` without a tree.
    words: Option<*const u32>,
    /// Words per query, `ceil(q_max / 32)`.
    query_words: usize,
    /// The key of bit 0. It is negative if there are more queries than keys.
    first_key: i64,
}

// SAFETY: the words belong to the call, which outlives its tasks, and no thread writes them.
unsafe impl Send for RowTree {}
// SAFETY: the threads of the call only read the words.
unsafe impl Sync for RowTree {}

impl Default for RowTree {
    fn default() -> Self {
        Self::NONE
    }
}

impl RowTree {
    /// No tree.
    pub(in crate::cpu) const NONE: Self = Self { words: None, query_words: 0, first_key: 0 };

    /// The tree of sequence `index`, which has `len_q` queries and `len_k` keys.
    ///
    /// # Safety
    /// The sequence is one of the mask's, whose words are readable for as long as this is used.
    pub(super) unsafe fn of(mask: Option<TreeMask>, index: usize, len_q: usize, len_k: usize) -> Self {
        mask.map_or(Self::NONE, |mask| Self {
            words: mask.of_sequence(index, len_q),
            query_words: mask.query_words,
            first_key: len_k as i64 - len_q as i64,
        })
    }

    /// Whether there is a tree.
    #[inline(always)]
    pub(super) fn exists(&self) -> bool {
        self.words.is_some()
    }

    /// Whether the tree says nothing of keys before `end`.
    #[inline(always)]
    pub(super) fn is_past(&self, end: usize) -> bool {
        !self.exists() || end as i64 <= self.first_key
    }

    /// The first key that the tree may hide.
    pub(super) fn first(&self) -> usize {
        if self.exists() { self.first_key.max(0) as usize } else { usize::MAX }
    }

    /// Whether the tree lets query `i` of the sequence attend to its key `j`.
    #[inline(always)]
    pub(super) fn shows(&self, i: usize, j: usize) -> bool {
        let Some(words) = self.words else { return true };
        let Ok(bit) = usize::try_from(j as i64 - self.first_key) else { return true };
        if bit / 32 >= self.query_words {
            return false;
        }
        // SAFETY: the query is one of the sequence, which has at most as many as the mask, and the word one of the query.
        let word = unsafe { words.add(i * self.query_words + bit / 32).read() };
        word >> (bit % 32) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_those_of_the_newest_keys_and_end_with_the_words() {
        // Two sequences of up to three queries, one word each.
        let words = [0, 0, 0, 0b001, 0b011, 0b1101];
        let mask = TreeMask { words: words.as_ptr(), max_queries: 3, query_words: 1 };
        let shown = |tree: RowTree, i: usize| (0..12).filter(|j| tree.shows(i, *j)).collect::<Vec<_>>();
        // SAFETY: the words outlive the trees.
        let tree = |len_q, len_k| unsafe { RowTree::of(Some(mask), 1, len_q, len_k) };
        assert_eq!(shown(tree(3, 7), 0), [0, 1, 2, 3, 4]);
        assert_eq!(shown(tree(3, 7), 1), [0, 1, 2, 3, 4, 5]);
        assert_eq!(shown(tree(3, 7), 2), [0, 1, 2, 3, 4, 6, 7]);
        // Bit 1 is key 0.
        assert_eq!(shown(tree(3, 2), 2), [1, 2]);
        assert!(!tree(4, 7).exists() && tree(4, 7).shows(3, 9) && RowTree::NONE.shows(0, 0));
        assert!(tree(3, 7).is_past(4) && !tree(3, 7).is_past(5) && RowTree::NONE.is_past(9));
        assert_eq!(tree(1, 40).first(), 39);
        assert!(!tree(1, 40).shows(0, 39 + 32));
    }
}
