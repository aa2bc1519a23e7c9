//! The buffers of an invocation in host or device memory.

use super::{Array, BufferView, Frame, GuardedBuffer, Invocation, POISON, ResultSpec};

/// One buffer in memory.
pub trait BufferMemory {
    fn data(&self) -> *mut u8;

    /// Reads the contents. Asserts that nothing around the buffer has changed.
    fn read(&self, name: &str) -> Vec<u8>;

    /// Strides in elements; `None` for a dense buffer.
    fn strides(&self) -> Option<&[i64]> {
        None
    }
}

impl BufferMemory for GuardedBuffer {
    fn data(&self) -> *mut u8 {
        Self::data(self)
    }

    fn read(&self, _: &str) -> Vec<u8> {
        self.assert_slack_untouched();
        self.bytes()
    }
}

/// The buffers of a call's operands, and one per result. The latter holds [`POISON`] before the call and is unused if
/// the result shares the memory of an operand.
pub struct CallBuffers<'a, M> {
    call: &'a Invocation,
    operands: Vec<M>,
    own: Vec<M>,
}

impl<'a, M: BufferMemory> CallBuffers<'a, M> {
    pub fn new(call: &'a Invocation, place: impl FnMut(&str, &Array) -> M) -> Self {
        Self::filled(call, POISON, place)
    }

    /// As [`CallBuffers::new`], with results that hold another byte.
    pub fn filled(call: &'a Invocation, byte: u8, mut place: impl FnMut(&str, &Array) -> M) -> Self {
        let own = call.results.iter().map(|r| place(r.name, &Array::filled(r.dtype, &r.dims, byte))).collect();
        Self { call, own, operands: call.operands.iter().map(|(name, x)| place(name, x)).collect() }
    }

    pub fn operand(&self, index: usize) -> &M {
        &self.operands[index]
    }

    /// The buffer of a result, which is an operand's if they share memory.
    pub fn result(&self, index: usize) -> &M {
        self.call.results[index].alias.map_or(&self.own[index], |at| &self.operands[at])
    }

    /// Views of the operands and of the results.
    pub fn views(&self) -> [Vec<BufferView<'_>>; 2] {
        fn view<M: BufferMemory>(memory: &M) -> BufferView<'_> {
            BufferView { data: memory.data(), strides: memory.strides() }
        }
        [&self.operands, &self.own].map(|list| list.iter().map(view).collect())
    }

    /// Adds these buffers and the call's attributes to `frame`.
    pub fn frame<'f>(&'f self, frame: Frame<'f>) -> Frame<'f> {
        let frame = frame.attributes(&self.call.attributes);
        let operands = self.call.operands.iter().zip(&self.operands);
        // SAFETY: the buffer has this dtype and shape, and `self` outlives the frame.
        let frame = operands.fold(frame, |f, ((_, x), m)| unsafe { f.operand(x.dtype, &x.dims, m.data()) });
        let results = self.call.results.iter().enumerate();
        // SAFETY: the buffer has this dtype and shape, and `self` outlives the frame.
        results.fold(frame, |f, (i, x)| unsafe { f.result(x.dtype, &x.dims, self.result(i).data()) })
    }

    /// Reads the results. Asserts that the call has changed no other operand.
    pub fn results(&self) -> Vec<Array> {
        self.assert_operands_unchanged(|index| self.call.results.iter().all(|r| r.alias != Some(index)));
        let of = |(index, result): (usize, &ResultSpec)| Array {
            dtype: result.dtype,
            dims: result.dims.clone(),
            bytes: self.result(index).read(result.name),
        };
        self.call.results.iter().enumerate().map(of).collect()
    }

    /// Asserts that a refused call has written nothing.
    pub fn assert_untouched(&self) {
        self.assert_operands_unchanged(|_| true);
        for (result, memory) in self.call.results.iter().zip(&self.own) {
            let untouched = memory.read(result.name).iter().all(|&b| b == POISON);
            assert!(
                untouched,
                "{} {}: {} was written by a refused call",
                self.call.target, self.call.description, result.name
            );
        }
    }

    fn assert_operands_unchanged(&self, which: impl Fn(usize) -> bool) {
        for (index, ((name, given), memory)) in self.call.operands.iter().zip(&self.operands).enumerate() {
            let same = memory.read(name) == given.bytes;
            assert!(same || !which(index), "{} {}: {name} has changed", self.call.target, self.call.description);
        }
    }
}
