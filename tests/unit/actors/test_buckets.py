from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from actors.buckets import BucketLadder
from actors.messages import Bucket
from tests.unit.actors.builders import engine_config


@dataclass(frozen=True)
class Ladder:
    """A ladder and what its configuration allows in a step."""

    sizes: BucketLadder
    seqs: int
    budget: int
    pages: int
    num_drafts: int


@dataclass(frozen=True)
class Step:
    """What a step has to hold, as a scheduler may ask for it."""

    num_decode: int
    num_verified: int
    num_drafts: int
    chunks: tuple[int, ...]
    num_emitting: int
    context_pages: int

    @property
    def num_tokens(self) -> int:
        return self.num_decode * (self.num_verified + 1) + sum(self.chunks)

    def bucket(self, ladder: Ladder) -> Bucket:
        width = ladder.sizes.prefill_width([*self.chunks]) if self.chunks else 0
        return ladder.sizes.bucket(
            num_decode=self.num_decode,
            num_verified=self.num_verified,
            num_drafts=self.num_drafts,
            num_prefill_rows=num_rows(self.chunks, width) if self.chunks else 0,
            prefill_width=width,
            num_emitting=self.num_emitting,
            context_pages=self.context_pages,
        )


@st.composite
def ladders(draw: st.DrawFn) -> Ladder:
    num_drafts = draw(st.integers(0, 15))
    seqs = draw(st.integers(1, 40))
    budget = max(16, seqs * (num_drafts + 1)) + draw(st.integers(0, 3000))
    narrower = draw(st.sets(st.integers(1, num_drafts), max_size=3)) if num_drafts else []
    config = engine_config(
        num_drafts=num_drafts,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=draw(st.integers(2, 5000)),
        block_size=draw(st.integers(1, 64)),
        verify_widths=(*sorted(narrower), num_drafts + 1),
        prefill_widths=draw(st.sampled_from([(16, 64, 256), (16,), (64,), (5, 33), (1, 7, 300)])),
    )
    sizes = BucketLadder.for_config(config)
    return Ladder(sizes, seqs, budget, config.pages_per_request, num_drafts)


def draw_step(data: st.DataObject, ladder: Ladder) -> Step:
    """Any step that the configuration allows: every request has one decode row or one chunk, and
    the budget holds what they may feed."""
    num_decode = data.draw(st.integers(0, ladder.seqs))
    left = ladder.budget - num_decode * (ladder.num_drafts + 1)
    chunks: list[int] = []
    for _ in range(data.draw(st.integers(num_decode == 0, ladder.seqs - num_decode))):
        if left:
            chunks.append(data.draw(st.integers(1, left)))
            left -= chunks[-1]
    num_ends = data.draw(st.integers(0, len(chunks)))
    return Step(
        num_decode=num_decode,
        num_verified=data.draw(st.integers(0, ladder.num_drafts)) if num_decode else 0,
        num_drafts=data.draw(st.integers(0, ladder.num_drafts)),
        chunks=tuple(chunks),
        num_emitting=num_decode + num_ends,
        context_pages=data.draw(st.integers(1, ladder.pages)),
    )


def shape(bucket: Bucket) -> Bucket:
    """What is compiled for a bucket: neither pages nor drafts change it."""
    return replace(bucket, context_pages=1, num_drafts=0)


def num_rows(chunks: tuple[int, ...], width: int) -> int:
    return sum(-(-chunk // width) for chunk in chunks)


def grid_tokens(bucket: Bucket) -> int:
    decode = bucket.decode_rows * bucket.verify_width
    return decode + bucket.prefill_rows * bucket.prefill_width


@given(ladders(), st.data())
def test_whatever_a_step_may_hold_fits(ladder: Ladder, data: st.DataObject) -> None:
    step = draw_step(data, ladder)
    bucket = step.bucket(ladder)
    assert step.num_decode <= bucket.decode_rows <= ladder.seqs
    assert bucket.verify_width >= step.num_verified + 1
    assert bucket.verify_width <= ladder.num_drafts + 1
    if step.chunks:
        assert bucket.prefill_width in ladder.sizes.prefill_widths
        assert bucket.prefill_rows >= num_rows(step.chunks, bucket.prefill_width)
    assert step.num_emitting <= bucket.emitting_rows <= ladder.seqs
    assert bucket.num_drafts == (step.num_drafts if step.num_emitting else 0)
    assert bucket.num_tokens >= max(grid_tokens(bucket), 2)
    assert step.context_pages <= bucket.context_pages <= ladder.pages


@given(ladders(), st.data())
def test_the_bucket_is_the_smallest_of_the_ladder(ladder: Ladder, data: st.DataObject) -> None:
    step, sizes = draw_step(data, ladder), ladder.sizes
    bucket = step.bucket(ladder)

    def smallest(steps: tuple[int, ...], needed: int) -> int:
        return min(size for size in steps if size >= needed)

    if step.num_decode:
        assert bucket.decode_rows == smallest(sizes.decode_rows, step.num_decode)
    if step.chunks:
        rows = num_rows(step.chunks, bucket.prefill_width)
        assert bucket.prefill_rows == smallest(sizes.prefill_rows, rows)
    if step.num_emitting:
        assert bucket.emitting_rows == smallest(sizes.decode_rows, step.num_emitting)
    assert bucket.verify_width == smallest(sizes.verify_widths, step.num_verified + 1)
    assert bucket.num_tokens == smallest(sizes.num_tokens, grid_tokens(bucket))
    assert bucket.context_pages == smallest(sizes.context_pages, step.context_pages)


@given(ladders(), st.data())
def test_padding_has_its_bounds(ladder: Ladder, data: st.DataObject) -> None:
    """By default: sizes double, so less than half of them is padding, and rows of a prompt go in
    half steps, so less than a third. Of all tokens, a decode grid and one of whole prefill rows
    are never padded; both together share the prefill grid's steps, or beyond those the largest."""
    step, sizes = draw_step(data, ladder), ladder.sizes
    bucket, narrowest = step.bucket(ladder), sizes.prefill_widths[0]
    if step.num_decode:
        assert bucket.decode_rows < 2 * step.num_decode
    if step.num_emitting:
        assert bucket.emitting_rows < 2 * step.num_emitting
    if step.chunks:
        assert 2 * bucket.prefill_rows < 3 * num_rows(step.chunks, bucket.prefill_width)
    assert bucket.context_pages < max(2 * step.context_pages, sizes.context_pages[0] + 1)
    grids = grid_tokens(bucket)
    if not step.chunks or (not step.num_decode and bucket.prefill_width == narrowest):
        assert bucket.num_tokens == max(grids, 2)
    elif grids <= narrowest * sizes.prefill_rows[-1]:
        assert 2 * bucket.num_tokens < 3 * (grids + narrowest)
    else:
        assert bucket.num_tokens < 2 * grids


@given(ladders(), st.data())
def test_more_never_needs_a_smaller_bucket(ladder: Ladder, data: st.DataObject) -> None:
    sizes = ladder.sizes

    def two(first: int, last: int) -> list[int]:
        return sorted(data.draw(st.tuples(st.integers(first, last), st.integers(first, last))))

    limits = {
        "num_decode": two(0, ladder.seqs),
        "num_verified": two(0, ladder.num_drafts),
        "num_drafts": two(0, ladder.num_drafts),
        "num_prefill_rows": two(0, sizes.prefill_rows[-1]),
        "num_emitting": two(0, ladder.seqs),
        "context_pages": two(1, ladder.pages),
    }
    small, large = (
        sizes.bucket(prefill_width=sizes.prefill_widths[0], **{k: v[i] for k, v in limits.items()})
        for i in range(2)
    )
    for name in small.__slots__:
        assert getattr(small, name) <= getattr(large, name)


@given(ladders(), st.data())
def test_the_prefill_width_pads_least(ladder: Ladder, data: st.DataObject) -> None:
    sizes, chunks = ladder.sizes, draw_step(data, ladder).chunks
    if not chunks:
        return

    def padded(width: int) -> int:
        rows = num_rows(chunks, width)
        return width * min(size for size in sizes.prefill_rows if size >= rows)

    chosen = sizes.prefill_width([*chunks])
    for width in sizes.prefill_widths:
        assert padded(chosen) < padded(width) or (
            padded(chosen) == padded(width) and chosen >= width
        )


@given(ladders())
def test_the_ladder_is_short_and_ascending(ladder: Ladder) -> None:
    sizes = ladder.sizes
    assert sizes.decode_rows[-1] == ladder.seqs
    assert sizes.verify_widths[-1] == ladder.num_drafts + 1
    assert sizes.context_pages[-1] == ladder.pages
    assert sizes.num_tokens[0] >= 2
    for name in sizes.__slots__:
        steps = getattr(sizes, name)
        assert list(steps) == sorted(set(steps))
        assert steps[0] >= 1
    for steps in (sizes.decode_rows, sizes.context_pages):
        assert len(steps) <= steps[-1].bit_length() + 1
    assert len(sizes.prefill_rows) <= 2 * sizes.prefill_rows[-1].bit_length()
    products = len(sizes.decode_rows) * len(sizes.verify_widths)
    assert len(sizes.num_tokens) <= products + len(sizes.prefill_rows) + 1


@given(ladders(), st.data())
def test_warm_up_has_every_shape_that_a_step_may_have(ladder: Ladder, data: st.DataObject) -> None:
    """Of token rows and of emitting rows: those are what is compiled."""
    warm = ladder.sizes.warm_up()
    step = draw_step(data, ladder)
    bucket = step.bucket(ladder)
    assert bucket.num_tokens in {each.num_tokens for each in warm}
    assert bucket.emitting_rows in {each.emitting_rows for each in warm}
    if not step.chunks:
        # More than the models is compiled for these.
        assert shape(bucket) in {shape(each) for each in warm}


@given(ladders())
def test_warm_up_is_made_of_steps_of_the_ladder_and_of_few(ladder: Ladder) -> None:
    sizes = ladder.sizes
    warm = sizes.warm_up()
    assert {bucket.num_tokens for bucket in warm} == set(sizes.num_tokens)
    assert {bucket.emitting_rows for bucket in warm} == {0, *sizes.decode_rows}
    decode = len(sizes.decode_rows) * len(sizes.verify_widths)
    assert (
        len(warm) == len(set(warm)) <= len(sizes.num_tokens) + len(sizes.decode_rows) + 1 + decode
    )
    for bucket in warm:
        assert bucket.decode_rows in {0, *sizes.decode_rows}
        assert bucket.verify_width in sizes.verify_widths
        assert bucket.prefill_rows in {0, *sizes.prefill_rows}
        assert bucket.num_tokens >= grid_tokens(bucket)
        assert bucket.context_pages in sizes.context_pages
        # A row of each request at most emits: these need no request that prefills.
        assert bucket.emitting_rows == bucket.decode_rows


@given(ladders())
def test_a_grid_without_rows_has_no_tokens(ladder: Ladder) -> None:
    widest, narrow = ladder.num_drafts + 1, ladder.sizes.prefill_widths[0]
    decode_only = Step(1, ladder.num_drafts, ladder.num_drafts, (), 1, 1).bucket(ladder)
    assert (decode_only.prefill_rows, decode_only.prefill_width) == (0, 0)
    assert decode_only.num_tokens == max(widest, 2)
    prefill_only = Step(0, 0, 0, (1,), 0, 1).bucket(ladder)
    assert (prefill_only.decode_rows, prefill_only.emitting_rows) == (0, 0)
    assert prefill_only.num_tokens == max(narrow, 2)


def test_prefill_rows_go_in_half_steps() -> None:
    # 320 tokens in rows of 16, and one partly filled row for each of 4 requests.
    ladder = BucketLadder.for_config(engine_config(max_num_batched_tokens=320))
    assert ladder.prefill_rows == (1, 2, 3, 4, 6, 8, 12, 16, 24)


def test_the_verify_width_is_the_drafts_and_the_bonus() -> None:
    assert BucketLadder.for_config(engine_config(num_drafts=3)).verify_widths == (4,)
    assert BucketLadder.for_config(engine_config(num_drafts=0)).verify_widths == (1,)


def test_tokens_are_those_of_either_grid_and_of_both_at_their_largest() -> None:
    config = engine_config(
        num_drafts=3, max_num_seqs=3, verify_widths=(1, 4), max_num_batched_tokens=32
    )
    # Decode 1, 2, 3 rows of 1 or 4 tokens, prefill 1, 2, 3, 4, 5 rows of 16.
    expected = (2, 3, 4, 8, 12, 16, 32, 48, 64, 80, 12 + 80)
    assert BucketLadder.for_config(config).num_tokens == expected


def test_warm_up_tells_decode_shapes_of_equally_many_tokens_apart() -> None:
    """Four rows of one token, two of two and one of four are compiled each."""
    ladder = BucketLadder.for_config(engine_config(num_drafts=3, verify_widths=(1, 2, 4)))
    decode = {
        (bucket.decode_rows, bucket.verify_width)
        for bucket in ladder.warm_up()
        if not bucket.prefill_rows
    }
    assert decode == {(rows, width) for rows in (1, 2, 4) for width in (1, 2, 4)}


def test_a_decode_step_has_rows_that_verify_and_propose_alike() -> None:
    config = engine_config(num_drafts=3, max_num_seqs=2, verify_widths=(1, 2, 4))
    ladder = BucketLadder.for_config(config)
    for rows in (1, 2):
        for drafts in (0, 1, 3):
            bucket = ladder.decode_step(rows, drafts)
            assert (bucket.decode_rows, bucket.verify_width) == (rows, drafts + 1)
            assert (bucket.num_drafts, bucket.prefill_rows) == (drafts, 0)


def test_a_step_without_drafts_exists_where_no_width_is_that_narrow() -> None:
    ladder = BucketLadder.for_config(engine_config(num_drafts=3, max_num_seqs=1))
    bucket = ladder.decode_step(1, 0)
    assert (bucket.verify_width, bucket.num_drafts) == (4, 0)
