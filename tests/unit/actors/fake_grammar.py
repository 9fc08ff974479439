"""What stands for `actors.grammar` where no tokenizer is."""

from collections.abc import Sequence

from actors.grammar import Grammars, GrammarState
from actors.messages import Guide

FORBIDDEN = 63


class FakeGrammar(GrammarState):
    """Forbids one token everywhere. A mask is the tokens that it stands behind, as bytes."""

    def __init__(self) -> None:
        self.committed: tuple[int, ...] = ()
        self.failure = ""

    def masks(self, drafts: Sequence[int]) -> tuple[int, list[bytes]]:
        num_allowed = len(allowed(drafts))
        return num_allowed, masks_behind(self.committed, drafts[:num_allowed])

    def commit(self, tokens: Sequence[int]) -> None:
        assert FORBIDDEN not in tokens
        self.committed += tuple(tokens)


class FakeGrammars(Grammars):
    """Keeps the states it started."""

    def __init__(self) -> None:
        self.started: list[FakeGrammar] = []

    def start(self, guide: Guide) -> FakeGrammar:
        self.started.append(FakeGrammar())
        return self.started[-1]


def allowed(drafts: Sequence[int]) -> Sequence[int]:
    """The leading ones."""
    return drafts[: drafts.index(FORBIDDEN)] if FORBIDDEN in drafts else drafts


def masks_behind(committed: Sequence[int], drafts: Sequence[int] = ()) -> list[bytes]:
    """Of a row that verifies these drafts."""
    return [bytes([*committed, *drafts[:count]]) for count in range(len(drafts) + 1)]
