//! Trees of query rows (`tree_mask`): which of a sequence's newest keys, those of its own queries, each query attends to.

use super::{Array, I32, Mask, Random};
use std::ops::Range;

/// `[len_q][len_q]`: whether a query attends to the key of another one.
pub type Tree = Vec<Vec<bool>>;

/// The operand `tree_mask` `[B, q_max, ceil(q_max / 32)]`.
#[derive(Clone, Debug)]
pub struct TreeMask {
    pub q_max: usize,
    pub words: Vec<i32>,
}

impl TreeMask {
    /// Words of a query.
    pub fn query_words(q_max: usize) -> usize {
        q_max.div_ceil(32)
    }

    /// The trees of the sequences of `slots` slots. Those with more than `q_max` queries have none. Bits that are not read are
    /// random.
    pub fn store<'a>(
        q_max: usize,
        slots: usize,
        trees: impl Iterator<Item = &'a Option<Tree>>,
        random: &mut Random,
    ) -> Self {
        let query_words = Self::query_words(q_max);
        let mut words: Vec<i32> = (0..slots * q_max * query_words).map(|_| random.next() as i32).collect();
        for (index, tree) in trees.enumerate() {
            for (i, row) in tree.iter().flatten().enumerate() {
                for (j, bit) in row.iter().enumerate() {
                    let word = &mut words[(index * q_max + i) * query_words + j / 32];
                    *word = *word & !(1 << (j % 32)) | i32::from(*bit) << (j % 32);
                }
            }
        }
        Self { q_max, words }
    }

    /// Whether a sequence of `len_q` queries has a tree.
    pub fn has_tree(&self, len_q: usize) -> bool {
        len_q <= self.q_max
    }

    /// The bit of query `i` and the key of query `j` of sequence `index`.
    pub fn bit(&self, index: usize, i: usize, j: usize) -> bool {
        let query_words = Self::query_words(self.q_max);
        self.words[(index * self.q_max + i) * query_words + j / 32] >> (j % 32) & 1 == 1
    }

    pub fn array(&self, slots: usize) -> Array {
        let dims = [slots, self.q_max, Self::query_words(self.q_max)].map(|size| size as i64);
        Array::i32s(&dims, &self.words)
    }
}

impl Mask {
    /// The mask of a sequence with a tree, which takes the place of what is causal in it.
    pub fn of_tree(self) -> Self {
        Self { causal: false, window_right: -1, ..self }
    }
}

/// Those of `keys` that a tree shows. `bit(j)` says whether the query attends to the key of query j.
pub fn shown(keys: Range<usize>, (len_q, len_k): (usize, usize), bit: impl Fn(usize) -> bool) -> Vec<usize> {
    // Key j is that of query j + len_q - len_k, if this is not negative.
    keys.filter(|j| (j + len_q).checked_sub(len_k).is_none_or(&bit)).collect()
}

/// A tree of drafts, a chain, or any bits.
pub fn random_tree(random: &mut Random, len_q: usize) -> Tree {
    let mut tree = vec![vec![false; len_q]; len_q];
    let form = random.below(4);
    for i in 0..len_q {
        match form {
            // Every node attends to itself and what its parent attends to. A root has no parent.
            0 | 1 => {
                let parent = if i == 0 || random.below(5) == 0 { None } else { Some(random.below(i)) };
                if let Some(parent) = parent {
                    let (before, own) = tree.split_at_mut(i);
                    own[0].clone_from(&before[parent]);
                }
                tree[i][i] = true;
            }
            2 => tree[i][..=i].fill(true),
            // Also rows without bits, and bits of later rows.
            _ => {
                let percent = random.one_of(&[0, 10, 50, 100]);
                tree[i].iter_mut().for_each(|bit| *bit = random.chance(percent));
            }
        }
    }
    tree
}
