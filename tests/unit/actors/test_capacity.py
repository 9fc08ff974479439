"""What nodes lack to hold an engine, against trying every division."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.capacity import Resources, Strategy, describe, shortage

AMOUNTS = st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, 2.0])
BUNDLES = st.lists(
    st.fixed_dictionaries({"CPU": AMOUNTS}, optional={"neuron_cores": AMOUNTS}),
    min_size=1,
    max_size=5,
)
NODES = st.dictionaries(
    st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
    st.fixed_dictionaries(
        {"CPU": st.sampled_from([0.0, 0.2, 0.6, 1.0, 2.5])},
        optional={"neuron_cores": st.sampled_from([1.0, 2.0, 3.0])},
    ),
)
SHARD = {"CPU": 0.5, "neuron_cores": 1}
ROUTER = {"CPU": 0.1}


def fits(bundles: Sequence[Resources], node: Resources) -> bool:
    return all(
        sum(round(10 * bundle.get(name, 0)) for bundle in bundles) <= round(10 * node.get(name, 0))
        for name in ("CPU", "neuron_cores")
    )


@given(BUNDLES, NODES)
def test_one_node_or_several_as_trying_everything_says(
    bundles: list[Resources], nodes: dict[str, Resources]
) -> None:
    together = any(fits(bundles, node) for node in nodes.values())
    divided = any(
        all(
            fits([b for b, on in zip(bundles, places, strict=True) if on == name], node)
            for name, node in nodes.items()
        )
        for places in product(nodes, repeat=len(bundles))
    )
    assert (shortage(bundles, "STRICT_PACK", nodes) is None) == together
    assert (shortage(bundles, "PACK", nodes) is None) == divided
    assert (shortage(bundles, "SPREAD", nodes) is None) == divided


@pytest.mark.parametrize(
    ("strategy", "nodes", "expected"),
    [
        (
            "STRICT_PACK",
            {"a": {"CPU": 8, "neuron_cores": 2}, "b": {"CPU": 8, "neuron_cores": 2}},
            "neuron_cores: 4 needed, the largest node has 2",
        ),
        ("PACK", {"a": {"CPU": 8, "neuron_cores": 2}, "b": {"CPU": 8, "neuron_cores": 2}}, None),
        (
            "PACK",
            {"a": {"CPU": 8, "neuron_cores": 2}, "b": {"CPU": 8}},
            "neuron_cores: 4 needed, all nodes together have 2",
        ),
        (
            "STRICT_PACK",
            {"a": {"CPU": 8}, "b": {"CPU": 1, "neuron_cores": 4}},
            "no node has (CPU 2.1, neuron_cores 4); a lacks only neuron_cores: neuron_cores 0",
        ),
        (
            "SPREAD",
            {"a": {"CPU": 8}, "b": {"CPU": 0.4, "neuron_cores": 4}},
            "a bundle of (CPU 0.5, neuron_cores 1) has to be on one node; no node has (CPU 0.5, "
            "neuron_cores 1); a lacks only neuron_cores: neuron_cores 0",
        ),
        (
            "SPREAD",
            {"a": {"CPU": 8, "neuron_cores": 3}, "b": {"CPU": 0.4, "neuron_cores": 1}},
            "the nodes can't divide 4 x (CPU 0.5, neuron_cores 1) and (CPU 0.1) among them",
        ),
        ("PACK", {}, "CPU: 2.1 needed, all nodes together have 0; neuron_cores: 4 needed, "
         "all nodes together have 0"),
        ("STRICT_PACK", {}, "there are no nodes"),
    ],
)  # fmt: skip
def test_the_shortage_names_resource_need_and_limit(
    strategy: Strategy, nodes: dict[str, Resources], expected: str | None
) -> None:
    assert shortage([ROUTER, *[SHARD] * 4], strategy, nodes) == expected


def test_a_rack_is_judged_at_once() -> None:
    nodes = {f"10.0.0.{i}": {"CPU": 192, "neuron_cores": 15} for i in range(100)}
    drafter = {"CPU": 1, "neuron_cores": 1}
    assert shortage([ROUTER, *[SHARD] * 64, *[drafter] * 8], "PACK", nodes) is None
    wide = {"CPU": 1, "neuron_cores": 8}
    assert shortage([ROUTER, *[wide] * 101], "PACK", nodes) is not None


def test_bundles_are_counted_by_kind() -> None:
    assert describe(ROUTER, SHARD, SHARD) == "2 x (CPU 0.5, neuron_cores 1) and (CPU 0.1)"
