"""Ends a text where one of the client's stop strings begins."""

from collections.abc import Sequence


class StopStrings:
    """Passes text through, and holds back what could be the beginning of a stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "an empty stop string would end every text"
        self._strings = tuple(strings)
        self._held = ""

    def __bool__(self) -> bool:
        return bool(self._strings)

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """The text that can go out, and whether a stop string was completed (it is left out).

        Only an `armed` text completes one, which may have begun before.
        """
        num_held = len(self._held)
        text = self._held + text
        if armed:
            # What was held back may contain a shorter stop string that was not looked for then.
            ends = ((s, max(0, num_held - len(s) + 1)) for s in self._strings)
            starts = [start for s, first in ends if (start := text.find(s, first)) >= 0]
            if starts:
                self._held = ""
                return text[: min(starts)], True
        keep = max((_overlap(text, s) for s in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text can complete it."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
