//! The one argument of Hopper's prefill kernels.

use super::super::params::Params;
use crate::cuda::tensor_map::TensorMap;
use crate::ops::attention::KeyStorage;
use std::mem::offset_of;

/// `PrefillParams` of `kernels/include/hopper/params.cuh`, which says what each is.
#[derive(Clone, Copy)]
#[repr(C)]
pub(in crate::cuda::attention) struct PrefillParams {
    pub(super) attention: Params,
    pub(super) q: TensorMap,
    pub(super) k: TensorMap,
    pub(super) v: TensorMap,
    pub(super) out: TensorMap,
    pub(super) next_tile: *mut u8,
    pub(super) grows: i32,
    pub(super) packs_per_kv_head: i32,
    pub(super) box_octets: i32,
    pub(super) key_panels: i32,
    pub(super) value_panels: i32,
    pub(super) group_shift: i32,
    pub(super) stores_boxes: i32,
    pub(super) page_divisor: PageDivisor,
}

/// `key / page_size` of a key below 2^31 is `((key * reciprocal) >> 31) >> shift`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct PageDivisor {
    reciprocal: u32,
    shift: i32,
}

impl PageDivisor {
    /// Pages are below 2^31.
    pub(super) fn of(storage: &KeyStorage) -> Self {
        let page_size = match storage {
            KeyStorage::Contiguous { .. } => 1,
            KeyStorage::Paged(table) => table.page_size as u64,
        };
        // As far as 2^shift covers the page the reciprocal has 32 bits, and what rounding it up adds to a quotient is
        // less than 1 / page_size.
        let shift = page_size.next_power_of_two().trailing_zeros();
        Self { reciprocal: (1u64 << (31 + shift)).div_ceil(page_size) as u32, shift: shift as i32 }
    }
}

// The header asserts the same numbers.
const _: () = assert!(offset_of!(PrefillParams, q) == 512 && offset_of!(PrefillParams, next_tile) == 1024);
const _: () = assert!(size_of::<PrefillParams>() == 1088 && align_of::<PrefillParams>() == 64);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention::PageTable;
    use std::ptr::null;

    #[test]
    fn keys_are_divided_by_the_page_size() {
        let most = (1u64 << 31) - 1;
        for page_size in [1, 2, 3, 4, 12, 100, 641, 65_535, 65_537, 1 << 30, (1 << 30) + 1, most - 1, most] {
            let table =
                PageTable { entries: null(), stride: 0, max_pages: 1, num_pages: 1, page_size: page_size as usize };
            let PageDivisor { reciprocal, shift } = PageDivisor::of(&KeyStorage::Paged(table));
            let divide = |key: u64| ((key * u64::from(reciprocal)) >> 31) >> shift;
            for multiple in [0, 1, 2, 3, 1000, most / page_size - 1, most / page_size] {
                let first = multiple * page_size;
                for key in [first.saturating_sub(1), first, first + 1, first + page_size - 1, most] {
                    if key <= most {
                        assert_eq!(divide(key), key / page_size, "{key} / {page_size}");
                    }
                }
            }
        }
    }
}
