"""What a server publishes for Prometheus."""

import json

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server import Server


def metrics_of(server: Server) -> dict[str, dict[str, float]]:
    """The counters of `actors.metrics` as Prometheus would scrape them now.

    By name without prefix and suffix, then by outcome or position, "" where there is neither:
    `{"requests": {"stop": 3}, "output_tokens": {"": 120}}`.
    """
    found: dict[str, dict[str, float]] = {}
    for target in _targets(server):
        text = httpx.get(f"http://{target}/metrics", timeout=30).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("ray_dflash_"):
                    name = sample.name.removeprefix("ray_dflash_").removesuffix("_total")
                    label = sample.labels.get("outcome") or sample.labels.get("position")
                    series = found.setdefault(name, {})
                    series[label or ""] = series.get(label or "", 0) + sample.value
    return found


def _targets(server: Server) -> set[str]:
    """`host:port` of every exporter, from the file that Ray writes for Prometheus."""
    files = server.temp_dir.rglob("prom_metrics*.json")
    groups = [group for file in files for group in json.loads(file.read_text())]
    return {target for group in groups for target in group["targets"]}
