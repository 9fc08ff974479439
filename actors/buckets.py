"""The static shapes a step may have. The scheduler picks one; ranks only obey it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from actors.config import EngineConfig
from actors.messages import Bucket

# Compilers write other code for a single row, which rounds otherwise.
_LEAST_TOKENS = 2


@dataclass(frozen=True, slots=True)
class BucketLadder:
    """Sizes that every dimension of a step is padded up to, each ascending."""

    decode_rows: tuple[int, ...]
    verify_widths: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    prefill_widths: tuple[int, ...]
    num_tokens: tuple[int, ...]
    context_pages: tuple[int, ...]

    @classmethod
    def for_config(cls, config: EngineConfig) -> "BucketLadder":
        """The ladder of `config.buckets`, reaching as far as the configuration allows."""
        sizes = config.buckets
        # The narrowest width splits a full budget into the most rows; each request that prefills
        # in the same step may add one partly filled row.
        narrowest = sizes.prefill_widths[0]
        most_rows = config.max_num_batched_tokens // narrowest + config.max_num_seqs
        prefill_rows = _half_steps(most_rows)
        decode = {r * w for r, w in product(sizes.decode_sequences, sizes.verify_widths)}
        prefill = {rows * narrowest for rows in prefill_rows}
        return cls(
            decode_rows=sizes.decode_sequences,
            verify_widths=sizes.verify_widths,
            prefill_rows=prefill_rows,
            prefill_widths=sizes.prefill_widths,
            num_tokens=tuple(
                sorted(
                    {max(n, _LEAST_TOKENS) for n in (*decode, *prefill)}
                    | {max(decode) + max(prefill)}
                )
            ),
            context_pages=tuple(
                sorted({-(-length // config.block_size) for length in sizes.context_lengths})
            ),
        )

    def warm_up(self) -> list[Bucket]:
        """Buckets that between them have every number of token rows and of emitting rows, which
        is what the regions of a step are compiled for, and, because all of such a step is
        compiled, every shape of a step without prefill."""
        cover: dict[tuple[str, int, int], Bucket] = {}
        for bucket in self._all():
            cover.setdefault(("tokens", bucket.num_tokens, 0), bucket)
            cover.setdefault(("emitting", bucket.emitting_rows, 0), bucket)
            if not bucket.prefill_rows:
                cover.setdefault(("decode", bucket.decode_rows, bucket.verify_width), bucket)
        return list(dict.fromkeys(cover.values()))

    def decode_step(self, num_rows: int, num_drafts: int) -> Bucket:
        """A step of decode rows alone that each verify and propose `num_drafts`."""
        return self.bucket(
            num_decode=num_rows,
            num_verified=num_drafts,
            num_drafts=num_drafts,
            num_prefill_rows=0,
            prefill_width=0,
            num_emitting=num_rows,
            context_pages=1,
        )

    def decode_size(self, num_rows: int) -> int:
        """What so many rows that decode are padded to."""
        return _fit(self.decode_rows, num_rows)

    def prefill_width(self, chunks: list[int]) -> int:
        """The width that pads these chunk lengths least; of equals the widest, for fewer rows."""
        return min(
            reversed(self.prefill_widths),
            key=lambda width: width * _fit(self.prefill_rows, _rows(chunks, width)),
        )

    def bucket(
        self,
        *,
        num_decode: int,
        num_verified: int,
        num_drafts: int,
        num_prefill_rows: int,
        prefill_width: int,
        num_emitting: int,
        context_pages: int,
    ) -> Bucket:
        """The smallest bucket that holds so many rows and pages; decode rows verify at most
        `num_verified` drafts, and `num_drafts` are proposed."""
        decode_rows = _fit(self.decode_rows, num_decode) if num_decode else 0
        verify_width = _fit(self.verify_widths, num_verified + 1)
        prefill_rows = _fit(self.prefill_rows, num_prefill_rows) if num_prefill_rows else 0
        prefill_width = prefill_width if num_prefill_rows else 0
        return Bucket(
            decode_rows=decode_rows,
            verify_width=verify_width,
            prefill_rows=prefill_rows,
            prefill_width=prefill_width,
            emitting_rows=_fit(self.decode_rows, num_emitting) if num_emitting else 0,
            num_drafts=num_drafts if num_emitting else 0,
            num_tokens=_fit(
                self.num_tokens, decode_rows * verify_width + prefill_rows * prefill_width
            ),
            context_pages=_fit(self.context_pages, context_pages),
        )

    def _all(self) -> Iterator[Bucket]:
        """Decode alone, then prefill alone, then both, smallest first."""
        shapes = [(rows, width, 0, 0) for rows in self.decode_rows for width in self.verify_widths]
        narrow, widest = self.prefill_widths[0], self.verify_widths[-1]
        shapes += [(0, widest, rows, narrow) for rows in self.prefill_rows]
        shapes += [(self.decode_rows[-1], widest, rows, narrow) for rows in self.prefill_rows]
        for decode, verify, prefill, width in shapes:
            yield self.bucket(
                num_decode=decode,
                num_verified=verify - 1,
                num_drafts=widest - 1,
                num_prefill_rows=prefill,
                prefill_width=width,
                num_emitting=decode,
                context_pages=1,
            )


def _rows(chunks: Iterable[int], width: int) -> int:
    return sum(-(-chunk // width) for chunk in chunks)


def _half_steps(last: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, ..: powers of two and what lies halfway, then `last`."""
    powers = [1 << i for i in range(last.bit_length())]
    sizes = {*powers, *(power * 3 // 2 for power in powers[1:])}
    return (*sorted(size for size in sizes if size < last), last)


def _fit(sizes: tuple[int, ...], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
