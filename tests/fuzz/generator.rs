//! What a call is drawn from: sizes, numbers, metadata.

use crate::support::{Array, BF16, Dtype, F8E4M3FN, F8E5M2, F16, F32, Random, count};
use std::ops::{Deref, DerefMut};
use std::sync::LazyLock;

/// The stream behind one call, and how bad the call is.
pub(crate) struct Generator {
    pub(crate) random: Random,
    /// Its metadata is.
    pub(crate) hostile: bool,
    /// There are NaN, infinities and the like among its numbers.
    pub(crate) special_values: bool,
}

/// Numbers of a table, which is what drawing them costs least.
const NUMBERS: usize = 4096;

/// Bell-shaped numbers of the types of attention, encoded.
static TABLES: LazyLock<Vec<(Dtype, Vec<u8>)>> = LazyLock::new(|| {
    let table = |dtype: Dtype| {
        let mut random = Random::new(dtype.0 as u64);
        let numbers: Vec<f64> = (0..NUMBERS).map(|_| random.normal()).collect();
        (dtype, Array::new(dtype, &[NUMBERS as i64], &numbers).bytes)
    };
    [F32, F16, BF16, F8E4M3FN, F8E5M2].map(table).into()
});

/// What a wild call has among its numbers: NaN of several kinds, infinities, the largest, the smallest, zeros.
fn specials(dtype: Dtype) -> Vec<Vec<u8>> {
    const INF: u32 = 0x7f80_0000;
    const SIGN: u32 = 1 << 31;
    // -1e30
    const LARGE: u32 = 0xf149_f2ca;
    let codes: &[u32] = match dtype {
        F32 => &[
            INF | 1 << 22,
            SIGN | INF | 0x40_1234,
            INF | 1,
            INF,
            SIGN | INF,
            INF - 1,
            LARGE,
            1,
            SIGN | 0xad00,
            0,
            SIGN,
        ],
        F16 => &[0x7e00, 0xfe12, 0x7c01, 0x7c00, 0xfc00, 0x7bff, 0xfbff, 0x0001, 0x83ff, 0x0000, 0x8000],
        BF16 => &[0x7fc0, 0xffc1, 0x7f81, 0x7f80, 0xff80, 0x7f7f, 0xf149, 0x0001, 0x807f, 0x0000, 0x8000],
        F8E4M3FN => &[0x7f, 0xff, 0x7e, 0xfe, 0x01, 0x87, 0x00, 0x80],
        F8E5M2 => &[0x7e, 0xfd, 0x7c, 0xfc, 0x7b, 0xfb, 0x01, 0x83, 0x00, 0x80],
        _ => panic!("{dtype:?} is no type of attention"),
    };
    codes.iter().map(|code| code.to_le_bytes()[..dtype.size()].to_vec()).collect()
}

impl Deref for Generator {
    type Target = Random;

    fn deref(&self) -> &Random {
        &self.random
    }
}

impl DerefMut for Generator {
    fn deref_mut(&mut self) -> &mut Random {
        &mut self.random
    }
}

impl Generator {
    /// For call `index` of `seed`.
    pub(crate) fn new(seed: u64, index: u64) -> Self {
        let mut random = Random::new(seed.rotate_left(32) ^ index);
        // Neighbouring seeds begin with streams that are far apart.
        let mut random = Random::new(random.next());
        let (hostile, special_values) = (random.below(10) < 6, random.below(20) < 7);
        Self { random, hostile, special_values }
    }

    pub(crate) fn head_dim(&mut self) -> usize {
        self.one_of(&[8, 8, 16, 24, 32, 40, 64, 64, 72, 96, 104, 128, 128, 136, 192, 256])
    }

    /// An i32 that may be anything, most often near `[0, limit]`.
    fn hostile(&mut self, limit: usize) -> i32 {
        let limit = limit as i64;
        let value = match self.random.below(5) {
            0 => i64::from(self.random.hostile_i32()),
            1 => self.one_of(&[-1, 0, 1, limit - 1, limit, limit + 1, 1 << 16, 1 << 30, -(1 << 30)]),
            _ => self.random.below(limit as usize + 5) as i64 - 2,
        };
        value as i32
    }

    /// `count` of metadata, hostile or made by `right`.
    fn metadata(&mut self, count: usize, limit: usize, right: impl FnOnce(&mut Self) -> Vec<i32>) -> Vec<i32> {
        // Not all at once, so that each is also seen among right ones.
        if self.hostile && self.chance(60) {
            return (0..count).map(|_| self.hostile(limit)).collect();
        }
        right(self)
    }

    fn up_to(&mut self, count: usize, limit: usize) -> Vec<i32> {
        (0..count).map(|_| self.random.below(limit + 1) as i32).collect()
    }

    /// Starts into `limit` rows.
    pub(crate) fn starts(&mut self, count: usize, limit: usize) -> Vec<i32> {
        self.metadata(count, limit, |generator| {
            let mut starts = generator.up_to(count, limit);
            starts.sort_unstable();
            if generator.chance(60) {
                starts[0] = 0;
                *starts.last_mut().unwrap() = if count > 1 { limit as i32 } else { 0 };
            }
            starts
        })
    }

    /// Lengths up to `limit`.
    pub(crate) fn lengths(&mut self, count: usize, limit: usize) -> Vec<i32> {
        self.metadata(count, limit, |generator| generator.up_to(count, limit))
    }

    /// Pages below `limit`, different ones as far as they go.
    pub(crate) fn pages(&mut self, count: usize, limit: usize) -> Vec<i32> {
        self.metadata(count, limit, |generator| {
            let mut pages: Vec<i32> = (0..limit as i32).collect();
            generator.random.shuffle(&mut pages);
            (0..count).map(|i| if limit == 0 { 0 } else { pages[i % limit] }).collect()
        })
    }

    /// Different slots below `limit`, and some that are none.
    pub(crate) fn slots(&mut self, count: usize, limit: usize, wide: bool) -> Vec<i64> {
        let mut free: Vec<i64> = (0..limit as i64).collect();
        self.random.shuffle(&mut free);
        let none = if self.hostile { 40 } else { 10 };
        let mut slot = |generator: &mut Self| {
            if generator.chance(none) {
                let limit = limit as i64;
                let narrow = [-1, -1, limit, limit + 1, i64::from(i32::MIN), i64::from(i32::MAX), -limit];
                return if wide && generator.chance(40) {
                    generator.one_of(&[i64::MIN, i64::MAX, 1 << 32, -(1 << 32), (1 << 32) + limit / 2])
                } else {
                    generator.one_of(&narrow)
                };
            }
            free.pop().unwrap_or(-1)
        };
        (0..count).map(|_| slot(self)).collect()
    }

    /// Numbers, some of them special if the call is wild.
    pub(crate) fn numbers(&mut self, dtype: Dtype, dims: &[usize]) -> Array {
        let dims: Vec<i64> = dims.iter().map(|&d| d as i64).collect();
        let (size, total) = (dtype.size(), count(&dims));
        let table = &TABLES.iter().find(|(of, _)| *of == dtype).unwrap().1;
        let row = dims.last().map_or(1, |&d| (d as usize).clamp(1, NUMBERS / 2));
        let mut bytes = Vec::with_capacity(total * size);
        while bytes.len() < total * size {
            let elements = row.min(total - bytes.len() / size);
            let at = self.random.below(NUMBERS - elements);
            bytes.extend_from_slice(&table[at * size..(at + elements) * size]);
        }
        let mut array = Array { dtype, dims, bytes };
        if self.special_values {
            self.insert_special_values(&mut array);
        }
        array
    }

    /// Put special numbers here and there, mostly few, so that there are sequences without.
    pub(crate) fn insert_special_values(&mut self, array: &mut Array) {
        let (size, specials) = (array.dtype.size(), specials(array.dtype));
        let elements = array.bytes.len() / size;
        if elements == 0 {
            return;
        }
        for _ in 0..self.one_of(&[0, 1, 1, 2, 3, elements / 64, elements / 8]) {
            let (at, special) = (self.random.below(elements), self.random.below(specials.len()));
            array.bytes[at * size..][..size].copy_from_slice(&specials[special]);
        }
    }

    /// `count` numbers of f32; a wild call may have one that is not finite.
    pub(crate) fn f32s(&mut self, count: usize, mut right: impl FnMut(&mut Random) -> f64) -> Vec<f32> {
        let mut numbers: Vec<f32> = (0..count).map(|_| right(&mut self.random) as f32).collect();
        if self.special_values && count > 0 && self.chance(15) {
            let at = self.random.below(count);
            numbers[at] = self.one_of(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -1.0, 1e-30]);
        }
        numbers
    }

    /// A scale, or none: one number, or one a KV head.
    pub(crate) fn scale(&mut self, heads: usize) -> Option<Vec<f32>> {
        let count = self.one_of(&[1, heads]);
        self.chance(25).then(|| self.f32s(count, |random| 0.25 + 1.75 * random.unit()))
    }
}
