//! [`super::kv_cache_update()`] for a cache with K and V in two tensors.

use super::{KvCacheUpdateInputs, KvCacheUpdateOptions, Memory, On, TensorMut, run};
use crate::error::Result;
use crate::problem::Op;
use crate::problem::arguments::kv_cache_update_split::{Operands, Results};

pub(super) fn update_split<M: Memory>(
    inputs: &KvCacheUpdateInputs<M>,
    options: &KvCacheUpdateOptions<M>,
    [k_cache, v_cache]: [TensorMut<M>; 2],
    on: On<M>,
) -> Result {
    let KvCacheUpdateInputs { key, value, slot_mapping } = *inputs;
    let KvCacheUpdateOptions { k_scale, v_scale } = *options;
    let (k, v) = (k_cache.as_operand(), v_cache.as_operand());
    let operands = Operands { k_cache: k, v_cache: v, key, value, slot_mapping, k_scale, v_scale };
    let results = Results { k_cache, v_cache };
    run(Op::KvCacheUpdateSplit, operands.in_order(), results.in_order(), &[], on)
}
