from collections.abc import Sequence
from dataclasses import replace

from actors.delivery import Delivery, joined
from actors.messages import FinishReason, SpeculationStats, TokenChunk, TokenLogprobs


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def chunk(
    request_id: str, first_index: int, *token_ids: int, finish: FinishReason | None = None
) -> TokenChunk:
    stats = SpeculationStats(verify_steps=first_index + len(token_ids))
    return TokenChunk(
        request_id=request_id,
        first_index=first_index,
        token_ids=token_ids,
        finish_reason=finish,
        speculation=stats,
        logprobs=tuple(TokenLogprobs(logprob=-token, rank=1) for token in token_ids),
    )


def told(chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
    """Without which steps they come from."""
    return [replace(chunk, earlier=()) for chunk in chunks]


def test_without_an_interval_every_chunk_passes_at_once() -> None:
    delivery = Delivery(0)
    for index in range(3):
        chunks = [chunk("a", index, 5), chunk("b", index, 6)]
        assert delivery.push(chunks) == chunks


def test_the_first_chunk_passes_and_the_next_ones_are_gathered() -> None:
    clock = Clock()
    delivery = Delivery(0.1, clock)
    assert delivery.push([chunk("a", 0, 5)]) == [chunk("a", 0, 5)]
    for index in range(1, 4):
        clock.now += 0.03
        assert delivery.push([chunk("a", index, 5 + index)]) == []
    clock.now += 0.03
    assert told(delivery.push([chunk("a", 4, 9, 10)])) == [chunk("a", 1, 6, 7, 8, 9, 10)]
    clock.now += 0.09
    assert delivery.push([chunk("a", 6, 11)]) == []


def test_the_last_chunk_does_not_wait() -> None:
    delivery = Delivery(0.1, Clock())
    delivery.push([chunk("a", 0, 5)])
    delivery.push([chunk("a", 1, 6)])
    last = delivery.push([chunk("a", 2, 7, finish="stop")])
    assert told(last) == [chunk("a", 1, 6, 7, finish="stop")]
    assert not delivery._streams


def test_a_request_of_one_chunk_passes_once() -> None:
    delivery = Delivery(0.1, Clock())
    only = chunk("a", 0, 5, finish="length")
    assert delivery.push([only]) == [only]
    assert delivery.push([]) == []


def test_streams_wait_apart() -> None:
    clock = Clock()
    delivery = Delivery(0.1, clock)
    delivery.push([chunk("a", 0, 5)])
    clock.now = 0.06
    assert delivery.push([chunk("a", 1, 6), chunk("b", 0, 7)]) == [chunk("b", 0, 7)]
    clock.now = 0.11
    assert delivery.push([chunk("b", 1, 8)]) == [chunk("a", 1, 6)], (
        "a's time has come without a step"
    )


def test_a_stream_that_was_cut_is_forgotten() -> None:
    clock = Clock()
    delivery = Delivery(0.1, clock)
    delivery.push([chunk("a", 0, 5)])
    delivery.push([chunk("a", 1, 6)])
    clock.now = 0.2
    assert delivery.push([]) == [chunk("a", 1, 6)]
    clock.now = 2
    assert delivery.push([]) == []
    assert not delivery._streams


def test_joined_chunks_are_one_that_ends_like_the_second() -> None:
    found = joined(chunk("a", 3, 5, 6), chunk("a", 5, 7, finish="length"))
    assert told([found]) == [chunk("a", 3, 5, 6, 7, finish="length")]


def test_a_joined_chunk_knows_what_speculation_had_done_at_each_token() -> None:
    """Of three steps, the second of which emitted two tokens."""
    of_steps = [
        SpeculationStats(verify_steps=1, draft_tokens=4, emitted_tokens=1),
        SpeculationStats(verify_steps=2, draft_tokens=8, accepted_tokens=1, emitted_tokens=3),
        SpeculationStats(verify_steps=3, draft_tokens=9, accepted_tokens=1, emitted_tokens=4),
    ]
    inside = SpeculationStats(verify_steps=2, draft_tokens=8, emitted_tokens=2)
    chunks = [chunk("a", 0, 5), chunk("a", 1, 6, 7), chunk("a", 3, 8)]
    one, two, three = (
        replace(each, speculation=stats) for each, stats in zip(chunks, of_steps, strict=True)
    )
    for found in (joined(joined(one, two), three), joined(one, joined(two, three))):
        at = [found.speculation_at(num_tokens) for num_tokens in (1, 2, 3, 4)]
        assert at == [of_steps[0], inside, *of_steps[1:]]


def test_what_is_known_of_the_prompt_stays_with_the_first_chunk() -> None:
    first = replace(chunk("a", 0, 5), prompt_logprobs=(None,), cached_tokens=3)
    found = joined(first, chunk("a", 1, 6))
    assert (found.prompt_logprobs, found.cached_tokens) == ((None,), 3)
