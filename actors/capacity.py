"""Whether nodes hold an engine, and what is missing where they don't. Plain data in, text out.

`Resources` are Ray's: a name and an amount, to four decimals.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Literal

Strategy = Literal["STRICT_PACK", "PACK", "SPREAD"]
Resources = Mapping[str, float]

_UNIT = 10_000
# In the order of `_kinds`: of each kind of bundle so many.
_Counts = tuple[int, ...]


def shortage(
    bundles: Sequence[Resources], strategy: Strategy, nodes: Mapping[str, Resources]
) -> str | None:
    """What `nodes` lack to hold all `bundles`, or None where they hold them.

    Exact: STRICT_PACK wants one node that holds the sum, the other strategies any division of the
    bundles among the nodes. `nodes` hold what each has in all, or what is free on it.
    """
    if strategy == "STRICT_PACK":
        return _shortage_of_one(_sum(bundles), nodes)
    kinds = _kinds(bundles)
    if _divides(kinds, nodes.values()):
        return None
    wanted, there = _sum(bundles), _sum(nodes.values())
    lacking = [name for name in wanted if _units(there.get(name, 0)) < _units(wanted[name])]
    if lacking:
        return "; ".join(
            f"{name}: {wanted[name]:g} needed, all nodes together have {there.get(name, 0):g}"
            for name in lacking
        )
    for kind in kinds:
        bundle = dict(kind)
        if lack := _shortage_of_one(bundle, nodes):
            return f"a bundle of {describe(bundle)} has to be on one node; {lack}"
    return f"the nodes can't divide {describe(*bundles)} among them"


def describe(*bundles: Resources) -> str:
    """`4 x (CPU 0.5, neuron_cores 1) and (CPU 0.1)`."""
    texts = []
    for kind, count in sorted(_kinds(bundles).items(), key=lambda item: -item[1]):
        inside = ", ".join(f"{name} {amount:g}" for name, amount in kind)
        texts.append(f"({inside})" if count == 1 else f"{count} x ({inside})")
    return " and ".join(texts)


def _shortage_of_one(wanted: Resources, nodes: Mapping[str, Resources]) -> str | None:
    if not nodes:
        return "there are no nodes"
    lacks = {
        node: [name for name in wanted if _units(has.get(name, 0)) < _units(wanted[name])]
        for node, has in nodes.items()
    }
    if not all(lacks.values()):
        return None
    largest = {name: max(has.get(name, 0) for has in nodes.values()) for name in wanted}
    short = [name for name in wanted if _units(largest[name]) < _units(wanted[name])]
    if short:
        return "; ".join(
            f"{name}: {wanted[name]:g} needed, the largest node has {largest[name]:g}"
            for name in short
        )
    node, lacking = min(lacks.items(), key=lambda item: len(item[1]))
    return (
        f"no node has {describe(wanted)}; {node} lacks only {' and '.join(lacking)}: "
        + ", ".join(f"{name} {nodes[node].get(name, 0):g}" for name in lacking)
    )


def _divides(
    kinds: Mapping[tuple[tuple[str, float], ...], int], nodes: Iterable[Resources]
) -> bool:
    """Whether bundles of these kinds and counts can be divided among the nodes."""
    needs = [[(name, _units(amount)) for name, amount in kind] for kind in kinds]

    @cache
    def fillings(room: tuple[tuple[str, int], ...]) -> list[_Counts]:
        """What fills a node with `room`: nothing that could be added fits."""
        return list(_fillings(needs, tuple(kinds.values()), dict(room)))

    # The counts that may be left after some nodes are filled.
    left: set[_Counts] = {tuple(kinds.values())}
    names = {name for need in needs for name, _ in need}
    for node in nodes:
        room = tuple(sorted((name, _units(node.get(name, 0))) for name in names))
        left = {
            tuple(max(0, a - b) for a, b in zip(counts, filling, strict=True))
            for counts in left
            for filling in fillings(room)
        }
        if any(not any(counts) for counts in left):
            return True
    return not any(kinds.values())


def _fillings(
    needs: Sequence[Sequence[tuple[str, int]]], counts: _Counts, room: Mapping[str, int]
) -> Iterator[_Counts]:
    if not needs:
        yield ()
        return
    need = needs[0]
    fits = min([counts[0], *(room.get(name, 0) // amount for name, amount in need if amount)])
    for count in range(fits if len(needs) == 1 else 0, fits + 1):
        rest = dict(room)
        for name, amount in need:
            rest[name] = rest.get(name, 0) - count * amount
        for filling in _fillings(needs[1:], counts[1:], rest):
            yield (count, *filling)


def _kinds(bundles: Iterable[Resources]) -> dict[tuple[tuple[str, float], ...], int]:
    """How many there are of each kind of bundle, zeros left out."""
    kinds: dict[tuple[tuple[str, float], ...], int] = {}
    for bundle in bundles:
        kind = tuple((name, amount) for name, amount in sorted(bundle.items()) if amount)
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def _sum(bundles: Iterable[Resources]) -> dict[str, float]:
    units: dict[str, int] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            units[name] = units.get(name, 0) + _units(amount)
    return {name: amount / _UNIT for name, amount in units.items()}


def _units(amount: float) -> int:
    return round(amount * _UNIT)
