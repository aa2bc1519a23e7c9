"""The demo's page allocator and scheduler: properties of every schedule, without a model."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_llama  # noqa: F401 - makes the demo's modules importable

from llama.batch import NO_SLOT, BatchBuilder  # isort: skip
from llama.pages import OutOfPagesError, PageAllocator  # isort: skip
from llama.scheduler import UNKNOWN, RequestError, Scheduler  # isort: skip

VOCABULARY = 50


def test_pages_that_do_not_exist_are_neither_allocated_nor_released():
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    with pytest.raises(OutOfPagesError, match="2 pages were requested"):
        allocator.allocate(2)
    allocator.release(pages)
    with pytest.raises(ValueError, match=f"page {pages[-1]} is released but not allocated"):
        allocator.release(pages)


def predict(tokens: list[int]) -> int:
    """A fake model, whose next token is a function of all tokens before it."""
    return hash(tuple(tokens)) % VOCABULARY


def predict_alone(prompt: list[int], max_new_tokens: int, stop_tokens: frozenset[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        tokens.append(predict(tokens))
        if tokens[-1] in stop_tokens:
            break
    return tokens[len(prompt) :]


def check_step(scheduler: Scheduler, chunks: list) -> None:
    """Assert the invariants after `schedule`."""
    page_size = scheduler.page_size
    assert chunks or scheduler.finishing or not scheduler.has_work
    assert all(chunk.length > 0 for chunk in chunks)
    assert sum(chunk.length for chunk in chunks) <= scheduler.token_budget
    assert len(scheduler.running) <= scheduler.max_num_seqs
    pages = [page for sequence in scheduler.running + scheduler.finishing for page in sequence.pages]
    assert scheduler.prefix_cache or len(set(pages)) == len(pages), "two live sequences share a page"
    assert len(set(pages)) + scheduler.allocator.num_free == scheduler.allocator.num_pages
    slots = [sequence.slot for sequence in scheduler.running]
    assert len(set(slots)) == len(slots) and all(0 <= slot < scheduler.max_num_seqs for slot in slots)
    assert all(not sequence.pages and not sequence.num_cached for sequence in scheduler.waiting)
    assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
    indices = [s.index for s in scheduler.running] + [s.index for s in scheduler.waiting]
    assert indices == sorted(indices), "a later prompt overtook an earlier one"
    for chunk in chunks:
        sequence = chunk.sequence
        assert sequence in scheduler.running
        assert chunk.start == sequence.num_cached and chunk.length >= 1
        assert chunk.start + chunk.length <= min(len(sequence.tokens), len(sequence.pages) * page_size)
        assert len(sequence.pages) <= scheduler.max_pages_per_seq


@settings(max_examples=150, derandomize=True, deadline=None)
@given(data=st.data())
def test_every_schedule_finishes_every_prompt_with_the_tokens_of_its_own(data):
    """With and without a prefix cache; each step is resolved at once, or only when later ones are scheduled."""
    lag = data.draw(st.integers(0, 3), "lag")
    page_size = data.draw(st.integers(1, 5), "page_size")
    num_pages = data.draw(st.integers(1, 20), "num_pages")
    max_num_seqs = data.draw(st.integers(1, 4), "max_num_seqs")
    scheduler = Scheduler(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_pages_per_seq=data.draw(st.integers(1, num_pages), "max_pages_per_seq"),
        token_budget=data.draw(st.integers(max_num_seqs, 12), "token_budget"),
        stop_tokens=frozenset(data.draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=3), "stop_tokens")),
        prefix_cache=data.draw(st.booleans(), "prefix_cache"),
    )
    prompt = st.lists(st.integers(0, data.draw(st.sampled_from((0, VOCABULARY - 1)), "largest")), max_size=15)
    prompts = data.draw(st.lists(prompt, max_size=6), "prompts")
    accepted, cached = [], {}
    for prompt in prompts:
        max_new_tokens = data.draw(st.integers(1, 12))
        places = min(num_pages, scheduler.max_pages_per_seq) * page_size
        if not prompt or len(prompt) + max_new_tokens - 1 > places:
            with pytest.raises(RequestError):
                scheduler.add(prompt, max_new_tokens)
        else:
            accepted.append((prompt, scheduler.add(prompt, max_new_tokens)))

    builder = BatchBuilder(max_num_seqs, scheduler.max_pages_per_seq, page_size)
    last_tokens, predicted, unresolved = {}, {}, deque()
    while scheduler.has_work or unresolved:
        chunks = scheduler.schedule() if scheduler.has_work else []
        check_step(scheduler, chunks)
        total = sum(chunk.length for chunk in chunks)
        batch = builder.build(chunks, total + 2)
        token_ids = [last_tokens[-1 - token] if token < 0 else token for token in batch.token_ids.tolist()]
        # Replay the cache: what is written must be what a later step of the sequence finds under its block table.
        for row in range(total):
            cached[int(batch.slot_mapping[row])] = (token_ids[row], int(batch.positions[row]))
        assert (batch.slot_mapping[total:] == NO_SLOT).all() and batch.num_seqs[0] == len(chunks)
        next_tokens = []
        for entry, chunk in enumerate(chunks):
            seen = [
                cached[int(batch.block_tables[entry, position // page_size]) * page_size + position % page_size]
                for position in range(batch.context_lens[entry])
            ]
            index, known = chunk.sequence.index, enumerate(chunk.sequence.tokens)
            tokens = [predicted[index, place] if token == UNKNOWN else token for place, token in known]
            assert seen == list(zip(tokens, range(chunk.end), strict=False))
            first, end = batch.query_start_loc[entry : entry + 2]
            assert end - first == chunk.length and batch.last_rows[entry] == end - 1
            next_tokens.append(predict([token for token, _ in seen]))
            predicted[index, chunk.end] = next_tokens[-1]
        last_tokens |= dict(zip(batch.predicting_slots.tolist(), next_tokens, strict=False))
        assert (batch.query_start_loc[len(chunks) :] == total).all()
        scheduler.advance(chunks)
        if chunks:
            unresolved.append((chunks, next_tokens))
        while unresolved and (not chunks or len(unresolved) > lag):
            scheduler.resolve(*unresolved.popleft())

    assert scheduler.allocator.num_free == num_pages
    for prompt, sequence in accepted:
        assert sequence.generated == predict_alone(prompt, sequence.max_new_tokens, scheduler.stop_tokens)


def test_a_prompt_that_begins_alike_takes_over_full_pages():
    scheduler = scheduler_of(num_pages=5, prefix_cache=True)
    first = scheduler.add(list(range(9)), 1)
    while scheduler.has_work:
        scheduler.complete(chunks := scheduler.schedule(), [7] * len(chunks))
    assert first.is_done and scheduler.allocator.num_free == 5
    # The whole of the second page is known too, but the last token of a prompt is always computed.
    same, other = scheduler.add(list(range(8)), 1), scheduler.add([0, 1, 2, 3, 9, 5, 6, 7, 8], 1)
    starts = [(chunk.sequence, chunk.start) for chunk in scheduler.schedule()]
    assert starts[0] == (same, 4) and scheduler.prefix_hits >= 4
    assert other.num_cached in (0, 4)


def test_the_page_that_was_released_first_loses_its_contents_first():
    allocator = PageAllocator(3)
    old, new, plain = allocator.allocate(3)
    for page, key in ((old, b"old"), (new, b"new")):
        allocator.register(page, key)
        allocator.release([page])
    allocator.release([plain])
    assert allocator.allocate(2) == [plain, old]
    assert allocator.find([b"new"]) == [new] and allocator.find([b"old"]) == []
    allocator.acquire([new])
    assert allocator.num_free == 0
    with pytest.raises(OutOfPagesError):
        allocator.allocate(1)


def test_what_is_found_late_gives_no_token():
    """A stop token is found when the next step is already scheduled; a cancelled sequence gets nothing more."""
    scheduler = scheduler_of(stop_tokens=frozenset({5}))
    stopped, cancelled = scheduler.add([1], 6), scheduler.add([2], 6)
    scheduler.advance(first := scheduler.schedule())
    scheduler.advance(second := scheduler.schedule())
    assert [chunk.start for chunk in second] == [1, 1]
    assert scheduler.resolve(first, [5, 7]) == [0, 1] and stopped.is_done
    scheduler.cancel(cancelled)
    assert scheduler.resolve(second, [8, 9]) == []
    assert stopped.generated == [5] and not scheduler.has_work
    assert scheduler.allocator.num_free == 8 and scheduler.finished == [stopped]


def scheduler_of(**changes) -> Scheduler:
    return Scheduler(
        **{"num_pages": 8, "page_size": 4, "max_num_seqs": 2, "max_pages_per_seq": 8, "token_budget": 6} | changes
    )


def test_a_prefill_chunk_is_batched_with_decode_tokens():
    scheduler = scheduler_of()
    short, long = scheduler.add([1, 2], 5), scheduler.add(list(range(12)), 5)
    described = []
    for _ in range(4):
        chunks = scheduler.schedule()
        described.append([(chunk.sequence is long, chunk.start, chunk.length, chunk.is_decode) for chunk in chunks])
        scheduler.complete(chunks, [9] * len(chunks))
    assert described == [
        [(False, 0, 2, False), (True, 0, 4, False)],
        [(False, 2, 1, True), (True, 4, 5, False)],
        [(False, 3, 1, True), (True, 9, 3, False)],
        [(False, 4, 1, True), (True, 12, 1, True)],
    ]
    assert short.generated == [9, 9, 9, 9]


def test_the_youngest_sequence_is_evicted_and_comes_back_first():
    scheduler = scheduler_of(num_pages=4, max_num_seqs=3)
    first, second, third = (scheduler.add([1, 2, 3], 9) for _ in range(3))
    while not second.num_evictions:
        scheduler.complete(chunks := scheduler.schedule(), [7] * len(chunks))
    assert first.num_evictions == 0
    assert list(scheduler.waiting) == [second, third]
    assert second.num_cached == 0 and second.pages == [] and second.generated
    while scheduler.has_work:
        scheduler.complete(chunks := scheduler.schedule(), [7] * len(chunks))
    assert [sequence.generated for sequence in (first, second, third)] == [[7] * 9] * 3


def test_an_evicted_sequence_waits_until_its_tokens_are_known():
    scheduler = scheduler_of(num_pages=4, max_num_seqs=3)
    first, second = (scheduler.add([1, 2, 3], 9) for _ in range(2))
    unresolved = deque()
    while not second.num_evictions:
        unresolved.append(scheduler.schedule())
        scheduler.advance(unresolved[-1])
        if len(unresolved) > 2:
            scheduler.resolve(chunks := unresolved.popleft(), [7] * len(chunks))
    scheduler.cancel(first)
    assert second.tokens[-1] == UNKNOWN and not scheduler.schedule()
    while unresolved:
        scheduler.resolve(chunks := unresolved.popleft(), [7] * len(chunks))
    (chunk,) = scheduler.schedule()
    assert chunk.sequence is second and UNKNOWN not in second.tokens


def test_a_prompt_that_can_never_fit_names_the_pages_it_needs():
    scheduler = scheduler_of(num_pages=3)
    with pytest.raises(RequestError, match=r"prompt 1 can never fit: 10 tokens and 4 .* 4 pages of 4 .* can have 3"):
        scheduler.add(list(range(10)), 4)
    with pytest.raises(RequestError, match="has no tokens"):
        scheduler.add([], 4)
    with pytest.raises(ValueError, match="token_budget is 1, expected at least max_num_seqs = 2"):
        scheduler_of(token_budget=1)
