//! Division of a key by the page size with a multiplication.

use crate::cuda::params::hopper_prefill::PageDivisor;
use crate::problem::attention::KeyStorage;

impl PageDivisor {
    /// The page size is below 2^31.
    pub(super) fn of(storage: &KeyStorage) -> Self {
        let page_size = match storage {
            KeyStorage::Contiguous { .. } => 1,
            KeyStorage::Paged(table) => table.page_size as u64,
        };
        // page_size is in (2^(shift - 1), 2^shift], so the reciprocal fits 32 bits, and rounding it up adds less than
        // 1 / page_size to a quotient.
        let shift = page_size.next_power_of_two().trailing_zeros();
        Self { reciprocal: (1u64 << (31 + shift)).div_ceil(page_size) as u32, shift: shift as i32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::attention::PageTable;
    use std::ptr::null;

    #[test]
    fn keys_are_divided_by_the_page_size() {
        let max_key = (1u64 << 31) - 1;
        for page_size in [1, 2, 3, 4, 12, 100, 641, 65_535, 65_537, 1 << 30, (1 << 30) + 1, max_key - 1, max_key] {
            let table =
                PageTable { entries: null(), stride: 0, max_pages: 1, num_pages: 1, page_size: page_size as usize };
            let PageDivisor { reciprocal, shift } = PageDivisor::of(&KeyStorage::Paged(table));
            let divide = |key: u64| ((key * u64::from(reciprocal)) >> 31) >> shift;
            for multiple in [0, 1, 2, 3, 1000, max_key / page_size - 1, max_key / page_size] {
                let first = multiple * page_size;
                for key in [first.saturating_sub(1), first, first + 1, first + page_size - 1, max_key] {
                    if key <= max_key {
                        assert_eq!(divide(key), key / page_size, "{key} / {page_size}");
                    }
                }
            }
        }
    }
}
