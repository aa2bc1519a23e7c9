//! Operations on 8-bit types for instruction sets that look up no tables.

/// The operations of [`super::Simd`] on 8-bit types in scalar code.
macro_rules! scalar_fp8_operations {
    () => {
        type Fp8Table = &'static Fp8ToBf16Table;
        #[inline(always)]
        fn fp8_table(self, table: &'static Fp8ToBf16Table) -> Self::Fp8Table {
            table
        }
        #[inline(always)]
        unsafe fn load_fp8_pairs<const I8: bool>(self, table: Self::Fp8Table, from: *const u8, n: usize) -> Self::V {
            // SAFETY: i < n, and the caller guarantees n readable elements.
            let element = |i| if i < n { table.to_bf16::<I8>(unsafe { from.add(i).read() }) } else { bf16::ZERO };
            from_lanes(self, [0.0; MAX_LANES], |_, i| pack_pair(element(2 * i), element(2 * i + 1)))
        }
        #[inline(always)]
        unsafe fn interleave_fp8<const I8: bool>(
            self,
            table: Self::Fp8Table,
            first: *const u8,
            second: *const u8,
            n: usize,
        ) -> Self::V {
            let element = |from: *const u8, i| {
                if i >= n {
                    return bf16::ZERO;
                }
                // SAFETY: i < n, and the caller guarantees n readable elements in both rows.
                table.to_bf16::<I8>(unsafe { from.add(i).read() })
            };
            from_lanes(self, [0.0; MAX_LANES], |_, i| pack_pair(element(first, i), element(second, i)))
        }
    };
}
pub(super) use scalar_fp8_operations;
