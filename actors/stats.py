"""Counters of one engine since it started; `actors.metrics` publishes them."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStats:
    """`accepted_at[j]` counts accepted drafts at block position j (0 is the first draft).

    Everything is counted as clients see it: a draft accepted behind the token that ended its
    request does not count.

    `prefix_cache_queries` counts tokens of prompts that were looked up when their request first
    started, `prefix_cache_hits` those found; `evicted_pages` what had to be forgotten of them.
    `preemptions` counts how often a request had to give its pages to another, `recoveries` how
    often lost shards were replaced.
    """

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    verify_steps: int = 0
    draft_tokens: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    evicted_pages: int = 0
    preemptions: int = 0
    recoveries: int = 0
    drafter_losses: int = 0
    late_compiles: int = 0

    def count_verify(self, num_drafts: int, num_kept: int) -> None:
        """One row's verification of `num_drafts` drafts, which gave `num_kept` tokens."""
        self.verify_steps += 1
        self.draft_tokens += num_drafts
        self.accepted_at.update(range(num_kept - 1))

    @property
    def accepted_tokens(self) -> int:
        return self.accepted_at.total()
