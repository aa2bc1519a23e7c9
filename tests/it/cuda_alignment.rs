//! What only a GPU can show: rows that are aligned to their elements alone, which go element by element, or are refused.

use crate::support::device::{Around, Gpu, Memory};
use crate::support::{ANY_LSE, ATTENTION_DTYPES, Layout, Placed, Rope, Shape, State, Step, Storage, Update};
use xla_attention::{Action, Stream};

/// Rows of three chunks.
const DIMS: [usize; 2] = [24; 2];

#[test]
fn cache_rows_are_written_wherever_they_lie() {
    let Some(gpu) = Gpu::or_skip() else { return };
    for update in Update::each_type(&Layout::PAGED) {
        let update = Update { dims: DIMS, ..update };
        let found = update.invocation(true).run_on_gpu(&gpu, Around::Askew, 0).unwrap();
        assert!(found == update.expected(), "{update:?}");
    }
}

#[test]
fn rows_turn_wherever_they_lie() {
    let Some(gpu) = Gpu::or_skip() else { return };
    for (index, update) in Update::each_type(&[Layout::Interleaved]).into_iter().enumerate() {
        let update = Update { dims: DIMS, ..update };
        let rope = Rope { update, interleaved: index % 2 == 0, ..Rope::default() };
        let found = rope.invocation(true).run_on_gpu(&gpu, Around::Askew, 0).unwrap();
        assert!(found == rope.expected(), "{rope:?}");
    }
}

#[test]
fn states_merge_wherever_they_lie() {
    let Some(gpu) = Gpu::or_skip() else { return };
    for dtype in ATTENTION_DTYPES {
        let part = |seed| State::random(dtype, (5, 3, 64), &ANY_LSE, seed);
        let (a, b) = (part(1), part(2));
        State::of(&a.merge(&b).run_on_gpu(&gpu, Around::Askew, 0).unwrap()).assert_merged_from(&a, &b);
    }
}

#[test]
fn a_query_that_attention_cannot_read_is_refused_before_the_cache_is_written() {
    let Some(gpu) = Gpu::or_skip() else { return };
    let step = Step::new(&Shape::default().batch(), &Storage { workspace: None, ..Storage::default() });
    let invocation = step.invocation(true);
    let placed = Placed::new(&invocation, |name, array| {
        Memory::place(&gpu, array, if name == "query" { Around::Askew } else { Around::Redzones })
    });
    let [inputs, outputs] = placed.views();
    let launch = Action::LaunchCuda(Stream(gpu.stream as usize));
    // SAFETY: the views are the allocations above, which outlive `finish`.
    let refusal = unsafe { invocation.enter(launch, &inputs, &outputs) }.unwrap_err();
    gpu.finish();
    assert!(refusal.message.ends_with("expected multiples of 16 bytes for both"), "{}", refusal.message);
    placed.assert_untouched();
}
