//! Strided arrays, as eager torch and Rust may pass them.

use super::{Array, BufferMemory, count};

/// The byte between rows: NaN in every float dtype.
const GAP: u8 = 0xff;

/// The strides of an array whose rows (of the last dimension) are dense.
#[derive(Clone, Debug)]
pub struct StridedLayout {
    pub dims: Vec<i64>,
    /// In elements. The last one is 1.
    pub strides: Vec<i64>,
    /// Bytes per element.
    size: usize,
}

impl StridedLayout {
    /// Puts `gaps[i]` elements between the slices along dimension i, except the last dimension.
    pub fn new(array: &Array, gaps: &[i64]) -> Self {
        let rank = array.dims.len();
        let mut strides = vec![1i64; rank];
        for axis in (0..rank.saturating_sub(1)).rev() {
            strides[axis] = strides[axis + 1] * array.dims[axis + 1].max(1) + gaps[axis];
        }
        Self { dims: array.dims.clone(), strides, size: array.dtype.size() }
    }

    /// Bytes from the first element to the end of the last one.
    pub fn extent(&self) -> usize {
        if self.dims.contains(&0) {
            return 0;
        }
        let last: i64 = self.dims.iter().zip(&self.strides).map(|(d, s)| (d - 1) * s).sum();
        (last + 1) as usize * self.size
    }

    /// The bytes of `array` with gaps between its rows.
    pub fn to_strided(&self, array: &Array) -> Vec<u8> {
        let mut bytes = vec![GAP; self.extent()];
        self.for_each_row(|row, at, len| bytes[at..at + len].copy_from_slice(&array.bytes[row..row + len]));
        bytes
    }

    /// The elements of the strided `bytes`. Asserts that the gaps have not changed.
    pub fn to_dense(&self, bytes: &[u8]) -> Vec<u8> {
        let mut dense = vec![0; count(&self.dims) * self.size];
        let mut gaps = bytes.to_vec();
        self.for_each_row(|row, at, len| {
            dense[row..row + len].copy_from_slice(&bytes[at..at + len]);
            gaps[at..at + len].fill(GAP);
        });
        assert!(gaps.iter().all(|byte| *byte == GAP), "a gap was written");
        dense
    }

    /// Calls `work` with each row's offset in the dense and in the strided array, and its length, in bytes.
    fn for_each_row(&self, mut work: impl FnMut(usize, usize, usize)) {
        let Some((columns, outer)) = self.dims.split_last() else { return work(0, 0, self.size) };
        let len = *columns as usize * self.size;
        if len == 0 {
            return;
        }
        for row in 0..count(outer) {
            let (mut rest, mut at) = (row as i64, 0);
            for (dim, stride) in outer.iter().zip(&self.strides).rev() {
                at += rest % dim * stride;
                rest /= dim;
            }
            work(row * len, at as usize * self.size, len);
        }
    }
}

/// An array in memory, dense or strided.
pub struct Strided<M> {
    memory: M,
    strided_layout: Option<StridedLayout>,
}

impl<M> Strided<M> {
    /// `place` stores the bytes, gaps included.
    pub fn new(array: &Array, strided_layout: Option<StridedLayout>, place: impl FnOnce(&Array) -> M) -> Self {
        let memory = match &strided_layout {
            Some(strided_layout) => place(&Array { bytes: strided_layout.to_strided(array), ..array.clone() }),
            None => place(array),
        };
        Self { memory, strided_layout }
    }
}

impl<M: BufferMemory> BufferMemory for Strided<M> {
    fn data(&self) -> *mut u8 {
        self.memory.data()
    }

    /// The elements as a dense array. Asserts that the gaps have not changed.
    fn read(&self, name: &str) -> Vec<u8> {
        let bytes = self.memory.read(name);
        self.strided_layout.as_ref().map_or_else(|| bytes.clone(), |strided_layout| strided_layout.to_dense(&bytes))
    }

    fn strides(&self) -> Option<&[i64]> {
        self.strided_layout.as_ref().map(|strided_layout| &strided_layout.strides[..])
    }
}
