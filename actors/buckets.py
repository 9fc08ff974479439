"""The static shapes a step may have. The scheduler picks one; ranks only obey it."""

from dataclasses import dataclass

from actors.config import EngineConfig
from actors.messages import Bucket

_PREFILL_WIDTHS = (16, 64, 256)


@dataclass(frozen=True, slots=True)
class BucketLadder:
    """Sizes that every dimension of a step is padded up to, each ascending."""

    decode_rows: tuple[int, ...]
    verify_width: int
    prefill_widths: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    context_pages: tuple[int, ...]

    @classmethod
    def for_config(cls, config: EngineConfig) -> "BucketLadder":
        """Powers of two up to what the configuration allows."""
        # The narrowest width splits a full budget into the most rows; each request that prefills
        # in the same step may add one partly filled row.
        most_rows = config.max_num_batched_tokens // _PREFILL_WIDTHS[0] + config.max_num_seqs
        return cls(
            decode_rows=_doublings(1, config.max_num_seqs),
            verify_width=config.num_drafts + 1,
            prefill_widths=_PREFILL_WIDTHS,
            prefill_rows=_doublings(1, most_rows),
            context_pages=_doublings(min(4, config.pages_per_request), config.pages_per_request),
        )

    def warm_up(self) -> list[Bucket]:
        """Buckets that between them use every code path of a step."""
        decode = self.bucket(1, 0, 0, self.context_pages[0])
        prefill = self.bucket(1, 1, self.prefill_widths[-1], self.context_pages[0])
        return [decode, prefill]

    def prefill_width(self, chunks: list[int]) -> int:
        """The width that pads these chunk lengths least; of equals the widest, for fewer rows."""
        return min(
            reversed(self.prefill_widths),
            key=lambda width: width * _fit(self.prefill_rows, _rows(chunks, width)),
        )

    def bucket(
        self, num_decode: int, num_prefill_rows: int, prefill_width: int, context_pages: int
    ) -> Bucket:
        """The smallest bucket that holds so many rows and pages."""
        return Bucket(
            decode_rows=_fit(self.decode_rows, num_decode) if num_decode else 0,
            verify_width=self.verify_width,
            prefill_rows=_fit(self.prefill_rows, num_prefill_rows) if num_prefill_rows else 0,
            prefill_width=prefill_width if num_prefill_rows else 0,
            context_pages=_fit(self.context_pages, context_pages),
        )


def _rows(chunks: list[int], width: int) -> int:
    return sum(-(-chunk // width) for chunk in chunks)


def _doublings(first: int, last: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def _fit(sizes: tuple[int, ...], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
