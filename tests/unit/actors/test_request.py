from dataclasses import replace

import pytest

from actors.messages import FinishReason, SpeculationStats
from actors.prefix import HashChain, page_hashes
from actors.request import Request
from tests.unit.actors.builders import generate_request
from tests.unit.actors.fake_grammar import FakeGrammar

K = 9
STOP = 50
PROMPT_LEN = 5


def request(max_tokens: int, stops: frozenset[int] = frozenset({STOP})) -> Request:
    return Request(
        message=generate_request(prompt=PROMPT_LEN, max_tokens=max_tokens),
        stop_token_ids=stops,
        max_len=PROMPT_LEN + max_tokens,
    )


def run_of(length: int, stop_at: int | None = None) -> tuple[int, ...]:
    return tuple(STOP if i == stop_at else 10 + i for i in range(length))


def test_it_goes_on_behind_what_was_emitted_elsewhere() -> None:
    emitted, stats = (
        (10, 11, 12),
        SpeculationStats(verify_steps=1, draft_tokens=4, emitted_tokens=2),
    )
    message = generate_request(
        prompt=PROMPT_LEN, max_tokens=5, emitted_token_ids=emitted, emitted_speculation=stats
    )
    chain, grammar = HashChain(2, ""), FakeGrammar()
    r = Request(
        message=message,
        stop_token_ids=frozenset({STOP}),
        max_len=PROMPT_LEN + 5,
        chain=chain,
        grammar=grammar,
    )
    assert (r.prefill_len, r.num_left, r.output_token_ids) == (PROMPT_LEN + 3, 2, [*emitted])
    assert r.speculation == replace(stats, accepted_tokens=1)
    assert grammar.committed == emitted
    assert chain.hashes == list(page_hashes((*message.prompt_token_ids, *emitted), 2, ""))
    assert r.append((20, 21, 22)) == (20, 21)
    assert r.finish_reason == "length"
    r = Request(message=message, stop_token_ids=frozenset(), max_len=PROMPT_LEN + 5)
    r.count_crash()
    assert r.num_crashes == 1, "what was emitted elsewhere is no progress"


@pytest.mark.parametrize("offset", range(K + 1))
def test_a_stop_token_ends_the_run_at_every_offset(offset: int) -> None:
    r = request(max_tokens=100)
    run = run_of(K + 1, stop_at=offset)
    assert r.append(run) == run[: offset + 1]
    assert r.finish_reason == "stop"
    assert r.output_token_ids == list(run[: offset + 1])


@pytest.mark.parametrize("max_tokens", [1, 2, K, K + 1])
def test_the_limit_ends_the_run(max_tokens: int) -> None:
    r = request(max_tokens)
    assert r.append(run_of(K + 1)) == run_of(K + 1)[:max_tokens]
    assert r.finish_reason == "length"
    assert r.num_left == 0


@pytest.mark.parametrize("max_tokens", [1, 2, K, K + 1])
@pytest.mark.parametrize("offset", range(K + 1))
def test_the_earlier_end_names_the_reason(max_tokens: int, offset: int) -> None:
    r = request(max_tokens)
    reason: FinishReason = "stop" if offset < max_tokens else "length"
    kept = run_of(K + 1, stop_at=offset)[: min(offset + 1, max_tokens)]
    assert r.append(run_of(K + 1, stop_at=offset)) == kept
    assert r.finish_reason == reason


def test_a_run_short_of_every_end_is_taken_whole() -> None:
    r = request(max_tokens=K + 2)
    assert r.append(run_of(K + 1)) == run_of(K + 1)
    assert r.finish_reason is None
    assert (r.num_tokens, r.num_left) == (PROMPT_LEN + K + 1, 1)


def test_ends_are_counted_over_several_runs() -> None:
    r = request(max_tokens=5)
    assert r.append((10, 11, 12)) == (10, 11, 12)
    assert r.append((13, 14, STOP)) == (13, 14)
    assert r.finish_reason == "length"


def test_the_first_of_several_stop_tokens_counts() -> None:
    r = request(max_tokens=100, stops=frozenset({STOP, 11}))
    assert r.append((10, 11, STOP)) == (10, 11)


def test_without_stop_tokens_only_the_limit_ends() -> None:
    r = request(max_tokens=3, stops=frozenset())
    assert r.append((STOP, STOP, STOP, STOP)) == (STOP, STOP, STOP)
    assert r.finish_reason == "length"


@pytest.mark.parametrize("num_drafts", [0, 1, K])
def test_what_is_ahead_counts_as_emitted_in_full(num_drafts: int) -> None:
    r = request(max_tokens=20)
    assert (r.next_position, r.num_left_ahead) == (0, 20)
    r.num_ahead = 3  # a chunk that is not the last emits nothing
    assert (r.next_position, r.num_left_ahead) == (3, 20)
    r.num_computed, r.num_ahead = 3, PROMPT_LEN - 3
    assert (r.next_position, r.num_left_ahead) == (PROMPT_LEN, 19)
    r.append((10,))
    r.num_computed, r.num_ahead = PROMPT_LEN, 0
    assert (r.num_left, r.num_left_ahead) == (19, 19)
    r.num_ahead = num_drafts + 1
    assert r.next_position == PROMPT_LEN + num_drafts + 1
    assert (r.num_left, r.num_left_ahead) == (19, 19 - num_drafts - 1)


def test_only_a_guided_request_waits_for_what_is_ahead() -> None:
    free, guided = request(max_tokens=20), request(max_tokens=20)
    guided.grammar = FakeGrammar()
    for num_ahead in (0, 1, 4):
        free.num_ahead = guided.num_ahead = num_ahead
        assert not free.must_wait
        assert guided.must_wait == (num_ahead > 0)
