from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from actors.buckets import BucketLadder
from actors.messages import Bucket
from tests.unit.actors.builders import engine_config


@st.composite
def ladders(draw: st.DrawFn) -> tuple[BucketLadder, int, int, int]:
    """A ladder with its max_num_seqs, max_num_batched_tokens and pages per request."""
    num_drafts = draw(st.integers(0, 15))
    seqs = draw(st.integers(1, 40))
    budget = max(16, seqs * (num_drafts + 1)) + draw(st.integers(0, 3000))
    config = engine_config(
        num_drafts=num_drafts,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=draw(st.integers(2, 5000)),
        block_size=draw(st.integers(1, 64)),
    )
    return BucketLadder.for_config(config), seqs, budget, config.pages_per_request


@st.composite
def chunk_lists(draw: st.DrawFn, seqs: int, budget: int) -> list[int]:
    """Chunk lengths as one step may have them: one per request, within the token budget."""
    chunks: list[int] = []
    for _ in range(draw(st.integers(1, seqs))):
        left = budget - sum(chunks)
        if left:
            chunks.append(draw(st.integers(1, left)))
    return chunks


def num_rows(chunks: list[int], width: int) -> int:
    return sum(-(-chunk // width) for chunk in chunks)


@given(ladders(), st.data())
def test_whatever_a_step_may_hold_fits(
    ladder: tuple[BucketLadder, int, int, int], data: st.DataObject
) -> None:
    sizes, seqs, budget, pages = ladder
    chunks = data.draw(chunk_lists(seqs, budget))
    num_decode = data.draw(st.integers(0, seqs))
    context = data.draw(st.integers(1, pages))
    width = sizes.prefill_width(chunks)
    rows = num_rows(chunks, width)
    bucket = sizes.bucket(num_decode, rows, width, context)
    assert bucket.decode_rows >= num_decode
    assert bucket.prefill_rows >= rows
    assert bucket.prefill_width == width
    assert context <= bucket.context_pages <= pages
    assert bucket.decode_rows <= seqs


@given(ladders(), st.data())
def test_the_bucket_is_the_smallest_of_the_ladder(
    ladder: tuple[BucketLadder, int, int, int], data: st.DataObject
) -> None:
    sizes, seqs, _, pages = ladder
    num_decode = data.draw(st.integers(1, seqs))
    rows = data.draw(st.integers(1, sizes.prefill_rows[-1]))
    context = data.draw(st.integers(1, pages))
    bucket = sizes.bucket(num_decode, rows, sizes.prefill_widths[0], context)
    assert bucket.decode_rows == min(s for s in sizes.decode_rows if s >= num_decode)
    assert bucket.prefill_rows == min(s for s in sizes.prefill_rows if s >= rows)
    assert bucket.context_pages == min(s for s in sizes.context_pages if s >= context)
    # Sizes double, so less than half of a bucket is padding.
    assert bucket.decode_rows < 2 * num_decode
    assert bucket.prefill_rows < 2 * rows
    assert bucket.context_pages < max(2 * context, sizes.context_pages[0] + 1)


@given(ladders(), st.data())
def test_more_never_needs_a_smaller_bucket(
    ladder: tuple[BucketLadder, int, int, int], data: st.DataObject
) -> None:
    sizes, seqs, _, pages = ladder
    width = sizes.prefill_widths[0]

    def two(first: int, last: int) -> list[int]:
        return sorted(data.draw(st.tuples(st.integers(first, last), st.integers(first, last))))

    decode, rows, context = two(0, seqs), two(0, sizes.prefill_rows[-1]), two(1, pages)
    small = sizes.bucket(decode[0], rows[0], width, context[0])
    large = sizes.bucket(decode[1], rows[1], width, context[1])
    size: Callable[[Bucket], tuple[int, int, int]] = lambda b: (  # noqa: E731
        b.decode_rows,
        b.prefill_rows,
        b.context_pages,
    )
    assert all(a <= b for a, b in zip(size(small), size(large), strict=True))
    assert small.num_tokens <= large.num_tokens


@given(ladders(), st.data())
def test_the_prefill_width_pads_least(
    ladder: tuple[BucketLadder, int, int, int], data: st.DataObject
) -> None:
    sizes, seqs, budget, _ = ladder
    chunks = data.draw(chunk_lists(seqs, budget))

    def padded(width: int) -> int:
        return sizes.bucket(0, num_rows(chunks, width), width, 1).num_tokens

    chosen = sizes.prefill_width(chunks)
    for width in sizes.prefill_widths:
        assert padded(chosen) < padded(width) or (
            padded(chosen) == padded(width) and chosen >= width
        )


@given(ladders())
def test_the_ladder_is_short_and_ascending(ladder: tuple[BucketLadder, int, int, int]) -> None:
    sizes, seqs, _, pages = ladder
    assert sizes.decode_rows[-1] == seqs
    assert sizes.context_pages[-1] == pages
    for steps in (sizes.decode_rows, sizes.prefill_rows, sizes.context_pages):
        assert list(steps) == sorted(set(steps))
        assert len(steps) <= steps[-1].bit_length() + 1


@given(ladders())
def test_a_grid_without_rows_has_no_tokens(ladder: tuple[BucketLadder, int, int, int]) -> None:
    sizes, _, _, _ = ladder
    decode_only = sizes.bucket(1, 0, 0, 1)
    assert (decode_only.prefill_rows, decode_only.prefill_width) == (0, 0)
    assert decode_only.num_tokens == sizes.verify_width
    prefill_only = sizes.bucket(0, 1, 16, 1)
    assert prefill_only.decode_rows == 0
    assert prefill_only.num_tokens == 16


def test_the_verify_width_is_the_drafts_and_the_bonus() -> None:
    assert BucketLadder.for_config(engine_config(num_drafts=3)).verify_width == 4
    assert BucketLadder.for_config(engine_config(num_drafts=0)).verify_width == 1
