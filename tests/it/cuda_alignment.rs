//! GPU only: buffers that are aligned to their element size only are accessed element by element, or refused.

use crate::support::device::{BufferPadding, DeviceBuffer, Gpu};
use crate::support::{
    ANY_LSE, ATTENTION_DTYPES, BatchSpec, CacheUpdateCase, CallBuffers, KvLayout, MemoryLayout, PagedUpdateCase,
    RopeCase, State,
};
use xla_attention::{Action, Stream};

/// Rows of three 16-byte vectors.
const DIMS: [usize; 2] = [24; 2];

#[test]
fn misaligned_cache_rows_are_written() {
    let Some(gpu) = Gpu::or_skip() else { return };
    for update in CacheUpdateCase::each_type(&KvLayout::PAGED) {
        let update = CacheUpdateCase { dims: DIMS, ..update };
        let actual = update.invocation(true).run_on_gpu(&gpu, BufferPadding::Misaligned, 0).unwrap();
        assert!(actual == update.expected(), "{update:?}");
    }
}

#[test]
fn misaligned_rows_are_rotated() {
    let Some(gpu) = Gpu::or_skip() else { return };
    for (index, update) in CacheUpdateCase::each_type(&[KvLayout::Interleaved]).into_iter().enumerate() {
        let update = CacheUpdateCase { dims: DIMS, ..update };
        let rope = RopeCase { update, interleaved: index % 2 == 0, ..RopeCase::default() };
        let actual = rope.invocation(true).run_on_gpu(&gpu, BufferPadding::Misaligned, 0).unwrap();
        assert!(actual == rope.expected(), "{rope:?}");
    }
}

#[test]
fn misaligned_states_are_merged() {
    let Some(gpu) = Gpu::or_skip() else { return };
    for dtype in ATTENTION_DTYPES {
        let part = |seed| State::random(dtype, (5, 3, 64), &ANY_LSE, seed);
        let (a, b) = (part(1), part(2));
        State::of(&a.merge(&b).run_on_gpu(&gpu, BufferPadding::Misaligned, 0).unwrap()).assert_merged_from(&a, &b);
    }
}

#[test]
fn a_query_that_attention_cannot_read_is_refused_before_the_cache_is_written() {
    let Some(gpu) = Gpu::or_skip() else { return };
    let update = PagedUpdateCase::new(
        &BatchSpec::default().batch(),
        &MemoryLayout { workspace: None, ..MemoryLayout::default() },
    );
    let invocation = update.invocation(true);
    let buffers = CallBuffers::new(&invocation, |name, array| {
        DeviceBuffer::upload(
            &gpu,
            array,
            if name == "query" { BufferPadding::Misaligned } else { BufferPadding::Redzones },
        )
    });
    let [inputs, outputs] = buffers.views();
    let launch = Action::LaunchCuda(Stream(gpu.stream as usize));
    // SAFETY: the views are of `buffers`, which live until the stream has finished.
    let refusal = unsafe { invocation.run_action(launch, &inputs, &outputs) }.unwrap_err();
    gpu.finish();
    assert!(refusal.message.ends_with("expected multiples of 16 bytes for both"), "{}", refusal.message);
    buffers.assert_untouched();
}
