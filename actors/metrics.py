"""Publishes an engine's counters as Serve metrics, which Ray exports to Prometheus."""

from collections.abc import Mapping

from ray.serve import metrics

from actors.stats import EngineStats


class EngineMetrics:
    """Counters only ever grow, so each publication adds what has come since the last.

    Published names get Ray's prefix: `ray_dflash_output_tokens_total` and so on.
    """

    def __init__(self, model: str) -> None:
        """`model` labels every series. Only inside a Serve replica."""
        self._model = model
        self._published: dict[tuple[str, str], int] = {}
        self._counters = {
            name: metrics.Counter(name, description=description, tag_keys=("model", *labels))
            for name, description, labels in (
                ("dflash_requests", "Ended requests by outcome.", ("outcome",)),
                ("dflash_prompt_tokens", "Prompt tokens accepted.", ()),
                ("dflash_output_tokens", "Tokens generated.", ()),
                ("dflash_verify_steps", "Verify steps, one per request and step.", ()),
                ("dflash_draft_tokens", "Drafts verified.", ()),
                ("dflash_accepted_tokens", "Drafts accepted.", ()),
                ("dflash_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", ()),
                ("dflash_prefix_cache_hits", "Prompt tokens found in the prefix cache.", ()),
                ("dflash_evicted_pages", "Cached pages that made room for others.", ()),
                ("dflash_preemptions", "Running requests that made room for others.", ()),
                ("dflash_recoveries", "Lost shards that were replaced.", ()),
                ("dflash_drafter_losses", "Dedicated drafters that were lost.", ()),
                ("dflash_late_compiles", "Compilations after warm-up; should be none.", ()),
                (
                    "dflash_accepted_tokens_per_position",
                    "Drafts accepted, by position in the block (0 is the first draft).",
                    ("position",),
                ),
            )
        }

    def publish(self, stats: EngineStats) -> None:
        """Bring every series up to `stats`."""
        self._add("dflash_prompt_tokens", stats.prompt_tokens)
        self._add("dflash_output_tokens", stats.output_tokens)
        self._add("dflash_verify_steps", stats.verify_steps)
        self._add("dflash_draft_tokens", stats.draft_tokens)
        self._add("dflash_accepted_tokens", stats.accepted_tokens)
        self._add("dflash_prefix_cache_queries", stats.prefix_cache_queries)
        self._add("dflash_prefix_cache_hits", stats.prefix_cache_hits)
        self._add("dflash_evicted_pages", stats.evicted_pages)
        self._add("dflash_preemptions", stats.preemptions)
        self._add("dflash_recoveries", stats.recoveries)
        self._add("dflash_drafter_losses", stats.drafter_losses)
        self._add("dflash_late_compiles", stats.late_compiles)
        for outcome, count in list(stats.requests.items()):
            self._add("dflash_requests", count, {"outcome": outcome})
        for position, count in list(stats.accepted_at.items()):
            self._add("dflash_accepted_tokens_per_position", count, {"position": str(position)})

    def _add(self, name: str, total: int, labels: Mapping[str, str] = {}) -> None:
        key = (name, "".join(labels.values()))
        new = total - self._published.get(key, 0)
        if new > 0:
            self._counters[name].inc(new, tags={"model": self._model, **labels})
            self._published[key] = total
