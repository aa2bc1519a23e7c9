//! Operations that the instruction sets of x86-64 have in common.

/// The vector type and the operations of [`super::Simd`] that are one intrinsic each.
macro_rules! operations {
    ($v:ty: $splat:ident $load:ident $store:ident
        $add:ident $sub:ident $mul:ident $div:ident $fma:ident $max:ident) => {
        type V = $v;
        #[inline(always)]
        fn splat(self, x: f32) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $splat(x) }
        }
        #[inline(always)]
        unsafe fn load(self, from: *const f32) -> $v {
            // SAFETY: `self` proves the features, and the caller guarantees readable elements.
            unsafe { $load(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32, x: $v) {
            // SAFETY: `self` proves the features, and the caller guarantees writable elements.
            unsafe { $store(to, x) }
        }
        #[inline(always)]
        fn add(self, a: $v, b: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $add(a, b) }
        }
        #[inline(always)]
        fn sub(self, a: $v, b: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $sub(a, b) }
        }
        #[inline(always)]
        fn mul(self, a: $v, b: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $mul(a, b) }
        }
        #[inline(always)]
        fn div(self, a: $v, b: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $div(a, b) }
        }
        #[inline(always)]
        fn fma(self, a: $v, b: $v, c: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $fma(a, b, c) }
        }
        #[inline(always)]
        fn max(self, a: $v, b: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $max(a, b) }
        }
    };
}

pub(super) use operations;
