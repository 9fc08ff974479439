"""The contract between processes: frozen, tensor-free, and encoded as msgpack bytes.

`GenerateRequest` and `TokenChunk` travel between the OpenAI server and the router;
`StepPlan` and `StepOutput` between the router and its shards, once a step.
"""

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort"]
# How a step chooses: by argmax, from the distribution of the logits, or of logits that penalties,
# biases, min_tokens or bad words shaped first. Each can do what those before it can.
Choosing = Literal["greedy", "sampled", "shaped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Guide:
    """A grammar that the output must match to its end. `source` is a JSON schema, a regular
    expression or a Lark grammar; for `json_object` it is empty.
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar"]
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends; the names and meanings are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep every token, `min_p` drops those less
    probable than so much of the most probable one. `seed` and `choice`, the index among the
    choices of one prompt, feed the noise of sampled requests. Penalties, `logit_bias` (token id
    and addend), `bad_words` (token sequences that never occur) and `guide` shape the
    distribution, greedy or not. A token in `stop_token_ids`, or (unless `ignore_eos`) one of the
    target's end tokens, ends the request, but none of them before `min_tokens`.

    `logprobs` asks for the log-probability of each emitted token and of so many alternatives,
    before any of the above; `prompt_logprobs` for the same of the prompt. None asks for none.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationStats:
    """What speculation did for one request, cut where the request's output was cut.

    `emitted_tokens` counts tokens from verify steps only: the first token comes from prefill.
    """

    verify_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens emitted by verify steps per verify step, bonus included; None without steps."""
        return self.emitted_tokens / self.verify_steps if self.verify_steps else None

    def without(self, num_tokens: int) -> "SpeculationStats":
        """The same, had the last verify step emitted `num_tokens` fewer."""
        return replace(
            self,
            accepted_tokens=self.accepted_tokens - num_tokens,
            emitted_tokens=self.emitted_tokens - num_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One generation. `request_id` is unique among the requests an engine has in flight.

    Lower `priority` goes first. Cached prefixes are shared only within one `cache_salt`.
    `max_draft_tokens` bounds the drafts a step verifies; 0 turns speculation off, None leaves it
    to the engine.

    `emitted_token_ids` are those that the request got of an engine that was lost, which this one
    goes on behind as if they were its own, and `emitted_speculation` what went into them.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    max_draft_tokens: int | None = None
    emitted_token_ids: tuple[int, ...] = ()
    emitted_speculation: SpeculationStats = SpeculationStats()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token that stands there, whose `rank` among all is
    1 for the most probable, and `top` (id and log-probability), the most probable ones."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """The tokens that one step, or several, gave one request.

    `first_index` is the index of `token_ids[0]` in the request's output: a receiver that already
    has it (after a replay) drops the overlap, so delivery is exactly once. A token that ended the
    request is the last of `token_ids`. `speculation` covers the request up to this chunk; `earlier`
    says, for every step of this chunk but the last, how many of `token_ids` there were behind it
    and what `speculation` was.
    `logprobs` has one entry per token where the request asks for them. The first chunk brings
    `prompt_logprobs`, None for the first token of the prompt, and `cached_tokens`, how many tokens
    of the prompt came from the prefix cache.
    """

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    speculation: SpeculationStats = SpeculationStats()
    earlier: tuple[tuple[int, SpeculationStats], ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    cached_tokens: int = 0

    def speculation_at(self, num_tokens: int) -> SpeculationStats:
        """What `speculation` had been, had the output ended with so many of `token_ids`."""
        steps = (*self.earlier, (len(self.token_ids), self.speculation))
        end, speculation = next(step for step in steps if step[0] >= num_tokens)
        return speculation.without(end - num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """The padded shape of one step; every rank runs the step at exactly these sizes.

    A step's token rows are a decode grid `[decode_rows, verify_width]` followed by a prefill grid
    `[prefill_rows, prefill_width]` and padding up to `num_tokens`. At most `emitting_rows` rows
    emit tokens, and `num_drafts` drafts are proposed behind each; 0 leaves the drafter out. Every
    row may attend to `context_pages` KV pages.

    Tokens are chosen as `choosing` says. A step says log-probabilities of what it emits beside
    `num_logprobs` alternatives, and of what its prefill rows feed beside `num_prompt_logprobs`;
    -1 leaves them out. A `guided` step obeys the masks of its rows and says what it proposes.
    """

    decode_rows: int
    verify_width: int
    prefill_rows: int
    prefill_width: int
    emitting_rows: int
    num_drafts: int
    num_tokens: int
    context_pages: int
    choosing: Choosing = "greedy"
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    guided: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRow:
    """One request that verifies `num_drafts` drafts behind its bonus token.

    `position` is where the bonus token is fed, optimistic (all drafts accepted) while
    `prev_in_flight`: the row ran in the immediately preceding step and that output is unread.
    `masks`, where a grammar guides the request, say which tokens may stand behind each of its
    tokens: bit `i % 8` of byte `i // 8` is set where token `i` may.
    """

    slot: int
    position: int
    num_drafts: int
    propose: bool
    prev_in_flight: bool = False
    masks: tuple[bytes, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens fed, and emitted if every draft is accepted."""
        return self.num_drafts + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRow:
    """A run of a request's known tokens at positions `start ..`.

    A long chunk spans several rows of the prefill grid. `fresh` marks the first row of a request
    in its slot, which resets the slot. `last` marks the row whose final token is the last known
    one: it emits a token and, if `propose`, drafts. Behind all others stands `next_token_id`.
    `masks` are those of the emitted token, as in `DecodeRow`.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    fresh: bool
    last: bool
    propose: bool
    next_token_id: int = -1
    masks: tuple[bytes, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens fed."""
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageUpdate:
    """Pages appended to a slot's block table, from entry `first` on."""

    slot: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotSampling:
    """How the request that takes a slot is sampled; what is not said is as in `SamplingParams`.

    `seed` is that of the request's choice. `edits` are a token id, what is added to its logit (-inf
    forbids it), and the position from which on it no longer is. Output starts at `prompt_len`.
    `history` are the tokens in front of those that its rows feed, where a choice depends on them.
    """

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    edits: tuple[tuple[int, float, int], ...]
    bad_words: tuple[tuple[int, ...], ...]
    prompt_len: int
    history: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step for every rank. A plan without a bucket is empty: it only drains the pipeline.

    Where it `defers_drafts`, dedicated drafters compute during the step behind it what its rows
    propose: the next that has them is the one after.
    """

    step: int
    bucket: Bucket | None = None
    decode: tuple[DecodeRow, ...] = ()
    prefill: tuple[PrefillRow, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()
    samplings: tuple[SlotSampling, ...] = ()
    defers_drafts: bool = False

    @property
    def rows(self) -> tuple[DecodeRow | PrefillRow, ...]:
        return (*self.decode, *self.prefill)

    @property
    def emitting(self) -> tuple[DecodeRow | PrefillRow, ...]:
        """The rows that a `StepOutput` has tokens of, in its order."""
        return (*self.decode, *(row for row in self.prefill if row.last))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one step emitted.

    `sampled[i]` are the tokens of the i-th emitting row: the plan's decode rows in order, then its
    `last` prefill rows in order. `num_drafts[i]` is how many drafts that row really verified.
    `logprobs[i]` are those of its tokens, and `prompt_logprobs[j]` those of the tokens that stand
    behind the j-th prefill row's, without the one that a `last` row emits; both are empty where
    the bucket asks for none. `drafts[i]` are those that the i-th row of a guided step proposed.
    `late_compiles` counts compilations since warm-up, which should be none. `drafters_lost`: when
    the step began there were no dedicated drafters any more to propose behind it.
    """

    step: int
    sampled: tuple[tuple[int, ...], ...] = ()
    num_drafts: tuple[int, ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()
    late_compiles: int = 0
    drafters_lost: bool = False


_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_output_decoder = msgspec.msgpack.Decoder(StepOutput | None)


def encode(message: StepPlan | StepOutput | None) -> bytes:
    """Messages on the step path travel as bytes: Ray carries those at a third of a dict's cost."""
    return _encoder.encode(message)


def decode_plan(payload: bytes) -> StepPlan:
    """Raises `msgspec.DecodeError` where the payload is not a plan."""
    return _plan_decoder.decode(payload)


def decode_output(payload: bytes) -> StepOutput | None:
    """None is the output of a drained pipeline. Raises `msgspec.DecodeError`."""
    return _output_decoder.decode(payload)
