"""Structured output: which tokens a request's guide allows next, at every verified position."""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from llguidance import LLMatcher

from actors.errors import RequestRejected
from actors.grammar_compiler import FIELDS, GrammarCompiler, check_length, failure_of
from actors.grammar_probe import GrammarProbe
from actors.messages import Guide

MAX_COMPILED = 32
_MAX_VERDICTS = 256
_MAX_RENEWALS = 4


class Grammars:
    """The guides of one engine's requests, compiled once each while they are in use.

    JSON has one optional space behind each comma and colon and no other whitespace between its
    tokens; `json_object` is any object. Special tokens are forbidden, unless a Lark grammar names
    them. Refusals name the field `response_format` (for `json_object` and `json_schema`),
    `guided_regex` or `guided_grammar`.

    `check` may be called from any thread; `start`, and the states it makes, from one.
    """

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`directory` is the target's checkpoint, `vocab_size` and `eos_token_ids` are its
        config's. Nothing is read before the first guide.
        """
        self._compiler = GrammarCompiler(
            directory, vocab_size=vocab_size, eos_token_ids=eos_token_ids
        )
        self._probe = GrammarProbe(self._compiler)
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()
        self._verdicts: dict[Guide, str] = {}
        self._probing = threading.Lock()
        self._compiling = threading.Lock()

    def check(self, guide: Guide) -> None:
        """Compile `guide`, for `start` to find. Raises `RequestRejected` where it is invalid, too
        long, or takes too much to compile. Takes up to a second, unless `is_ready`.
        """
        check_length(guide)
        verdict = self._verdicts.get(guide)
        if verdict is None:
            # One at a time: whoever sends costly guides keeps one core busy, not all.
            with self._probing:
                verdict = self._verdicts.get(guide)
                if verdict is None:
                    verdict = self._verdicts[guide] = self._probe.ask(guide)
                if len(self._verdicts) > _MAX_VERDICTS:
                    del self._verdicts[next(iter(self._verdicts))]
        if verdict:
            raise RequestRejected(verdict, FIELDS[guide.kind])
        self._matcher(guide)

    def is_ready(self, guide: Guide) -> bool:
        """Whether `check` lets the guide pass at once."""
        with self._compiling:
            return guide in self._compiled and self._verdicts.get(guide) == ""

    def close(self) -> None:
        """End the process that `check` may have started."""
        with self._probing:
            self._probe.close()

    def start(self, guide: Guide) -> "GrammarState":
        """The state of a new request. Only for a guide that `check` lets pass, soon after that:
        compiling another may take any time, or the process. Raises `RequestRejected` where it is
        invalid.
        """
        return GrammarState(
            self._compiler, self._matcher(guide), renew=lambda: self._renewed(guide)
        )

    def _matcher(self, guide: Guide) -> LLMatcher:
        with self._compiling:
            known = self._compiled.get(guide)
        # Outside of the lock: whoever starts a request waits for no other's grammar.
        compiled = known or self._compiler.compile(guide)
        with self._compiling:
            self._compiled[guide] = compiled
            self._compiled.move_to_end(guide)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()

    def _renewed(self, guide: Guide) -> LLMatcher:
        with self._compiling:
            self._compiled.pop(guide, None)
        return self._matcher(guide)


class GrammarState:
    """How far one request has come in its grammar: a function of the committed tokens, so that a
    new state to which the same are committed gives the same masks.

    `finished` says that an end token was committed. `failure` says in one line why the grammar
    can't be followed to its end, and is empty while it can: a step would take too much, or no
    token continues the text. From then on only end tokens are allowed.
    """

    def __init__(
        self, compiler: GrammarCompiler, matcher: LLMatcher, renew: Callable[[], LLMatcher]
    ) -> None:
        """`matcher` stands at the grammar's start; `renew` compiles another one that does."""
        self._compiler = compiler
        self._matcher = matcher
        self._renew = renew
        self._num_renewals = 0
        self._token_ids: list[int] = []
        self.finished = False
        self.failure = ""

    def masks(self, drafts: Sequence[int]) -> tuple[int, list[bytes]]:
        """How many of the leading `drafts` are allowed behind the committed tokens, and a mask for
        the position behind these and behind each allowed draft.

        A mask is `[ceil(vocab_size / 32)]` little-endian int32: bit `i % 32` of word `i // 32` is
        set where token `i` is allowed, which at least one is. Leaves the state as it was.
        """
        if self.finished or self.failure:
            return 0, [self._compiler.end_mask]
        found = self._walk(drafts)
        if self._matcher.is_error() and self._num_renewals < _MAX_RENEWALS:
            # A matcher shares what it learns about its grammar with its copies, up to a limit that
            # other requests may have reached, or drafts. A new one may come further without.
            self._num_renewals += 1
            self._matcher = self._renew()
            self._consume(self._token_ids)
            found = self._walk(())
        if self._matcher.is_error():
            self.failure = failure_of(self._matcher)
            return 0, [self._compiler.end_mask]
        return len(found) - 1, found

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance by emitted tokens. Behind an end token, only others may follow.

        Raises `AssertionError` where the mask of its position forbids one.
        """
        text = list(itertools.takewhile(lambda token: not self._ends(token), tokens))
        ends = tokens[len(text) :]
        if text:
            assert not self.finished, "text behind an end token"
            assert not self.failure, "text where only end tokens are allowed"
            self._token_ids += text
            self._consume(text)
        if ends:
            assert all(self._ends(token) for token in ends), "text behind an end token"
            if not self.finished and not self.failure:
                assert _allows(self._matcher.compute_bitmask(), ends[0]), "the text is incomplete"
            self.finished = True

    def _walk(self, drafts: Sequence[int]) -> list[bytes]:
        """The masks at the current position and behind each allowed draft. Meaningless where the
        matcher is in an error state afterwards.
        """
        num_words = self._compiler.num_words
        masks = [self._matcher.compute_bitmask()[: 4 * num_words]]
        num_consumed = 0
        for draft in drafts:
            if not _allows(masks[-1], draft):
                break
            if self._ends(draft):
                masks.append(self._compiler.end_mask)
                break
            self._matcher.consume_token(draft)
            num_consumed += 1
            masks.append(self._matcher.compute_bitmask()[: 4 * num_words])
        self._matcher.rollback(num_consumed)
        return masks

    def _consume(self, text: list[int]) -> None:
        num_consumed = self._matcher.try_consume_tokens(text)
        assert num_consumed == len(text) or self._matcher.is_error(), (
            f"the grammar forbids token {text[num_consumed]}"
        )

    def _ends(self, token: int) -> bool:
        return token in self._compiler.eos_token_ids


def _allows(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)
