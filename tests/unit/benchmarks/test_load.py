"""Latencies and rates of hand-made samples."""

import pytest

from benchmarks.load import Sample, repeated, tok_s


def sample(submitted: float, first: float, finished: float, num_tokens: int) -> Sample:
    return Sample(
        submitted_at=submitted, first_token_at=first, finished_at=finished, num_tokens=num_tokens
    )


def test_latencies_of_one_request() -> None:
    one = sample(10.0, 10.5, 12.5, 5)
    assert one.ttft_s == 0.5
    assert one.tpot_s == 0.5  # four tokens behind the first, in two seconds


def test_a_single_token_has_no_time_per_further_token() -> None:
    assert sample(0.0, 1.0, 1.0, 1).tpot_s is None


def test_the_rate_is_over_the_whole_run() -> None:
    """30 tokens between the first submission, at 1, and the last end, at 6."""
    assert tok_s([sample(2.0, 3.0, 6.0, 20), sample(1.0, 2.0, 5.0, 10)]) == pytest.approx(6.0)


def test_too_few_texts_begin_again() -> None:
    assert repeated(["a", "b", "c"], 7) == ["a", "b", "c", "a", "b", "c", "a"]
    assert repeated(["a", "b", "c"], 2) == ["a", "b", "c"]
