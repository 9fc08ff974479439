"""What an engine can serve at all. The server asks before it queues, the engine before it runs."""

from collections.abc import Sequence

from actors.config import EngineConfig
from actors.errors import PromptTooLong, RequestRejected
from actors.messages import GenerateRequest, Guide, SamplingParams

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 32
# Of a request with min_tokens: only these have to be forbidden.
MAX_STOP_TOKEN_IDS = 64

# Inclusive. The bounds of integers are what they are stored in.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_k", 0, 2**31 - 1),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    # A logit times or by it stays finite.
    ("repetition_penalty", 0.01, 100),
    ("seed", -(2**63), 2**63 - 1),
    ("choice", 0, 2**31 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_LOGIT_BIAS = 100
# A word is banned with and without a space in front.
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
_GUIDES_WITH_SOURCE = ("json_schema", "regex", "grammar")


def check_prompt(config: EngineConfig, token_ids: Sequence[int], param: str = "prompt") -> None:
    """Raises `RequestRejected`, or `PromptTooLong`, naming `param`, where a prompt is unusable."""
    if not token_ids:
        raise RequestRejected("prompt has no tokens, at least one is needed", param)
    if len(token_ids) >= config.max_model_len:
        raise PromptTooLong(
            f"prompt has {len(token_ids)} tokens, the limit is {config.max_model_len - 1} "
            f"(max_model_len is {config.max_model_len}, and one token must be left for output)",
            param,
        )
    check_token_ids(config, token_ids, param)


def check_token_ids(config: EngineConfig, token_ids: Sequence[int], param: str) -> None:
    """Raises `RequestRejected` for the first id outside the vocabulary."""
    vocab_size = config.target.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestRejected(
                f"{param}: token id {token_id} is outside the vocabulary of {vocab_size}", param
            )


def check_sampling(config: EngineConfig, sampling: SamplingParams) -> None:
    """Raises `RequestRejected`, naming field, value and limit, for the first field out of range.

    `max_tokens` may reach beyond the context: the output then ends where the context does.
    """
    if sampling.max_tokens < 1:
        raise RequestRejected(
            f"max_tokens is {sampling.max_tokens}, at least 1 is needed", "max_tokens"
        )
    for name, low, high in _RANGES:
        value = getattr(sampling, name)
        # Written so that NaN is outside.
        if value is not None and not low <= value <= high:
            raise RequestRejected(f"{name} is {value}, it must be from {low} to {high}", name)
    if not 0 < sampling.top_p <= 1:
        raise RequestRejected(
            f"top_p is {sampling.top_p}, it must be above 0 and at most 1", "top_p"
        )
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise RequestRejected(
            f"min_tokens is {sampling.min_tokens}, it must be from 0 to max_tokens, "
            f"which is {sampling.max_tokens}",
            "min_tokens",
        )
    if sampling.min_tokens and len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestRejected(
            f"stop_token_ids holds {len(sampling.stop_token_ids)} tokens, "
            f"the limit is {MAX_STOP_TOKEN_IDS} beside min_tokens",
            "stop_token_ids",
        )
    check_token_ids(config, sampling.stop_token_ids, "stop_token_ids")
    _check_logit_bias(config, sampling.logit_bias)
    if len(sampling.bad_words) > MAX_BAD_SEQUENCES:
        raise RequestRejected(
            f"bad_words holds {len(sampling.bad_words)} token sequences, "
            f"the limit is {MAX_BAD_SEQUENCES}",
            "bad_words",
        )
    for word in sampling.bad_words:
        if not word:
            raise RequestRejected("bad_words: a word has no tokens", "bad_words")
        if len(word) > MAX_BAD_WORD_TOKENS:
            raise RequestRejected(
                f"bad_words: a word has {len(word)} tokens, the limit is {MAX_BAD_WORD_TOKENS}",
                "bad_words",
            )
        check_token_ids(config, word, "bad_words")
    if sampling.guide is not None:
        _check_guide(sampling.guide)


def check_request(config: EngineConfig, message: GenerateRequest) -> None:
    """Raises `RequestRejected`, naming field, value and limit, for what could never be served."""
    check_prompt(config, message.prompt_token_ids)
    check_sampling(config, message.sampling)
    check_token_ids(config, message.emitted_token_ids, "emitted_token_ids")
    if len(message.emitted_token_ids) >= _most_tokens(config, message):
        raise RequestRejected(
            f"emitted_token_ids holds {len(message.emitted_token_ids)} tokens, which is all there "
            "may be",
            "emitted_token_ids",
        )
    check_scheduling(config, message.priority, message.max_draft_tokens)


def check_scheduling(config: EngineConfig, priority: int, max_draft_tokens: int | None) -> None:
    """Raises `RequestRejected`, naming the field, where no engine of `config` could obey it."""
    if not -(2**63) <= priority < 2**63:
        raise RequestRejected(f"priority is {priority}, it must fit into 64 bits", "priority")
    if max_draft_tokens is None:
        return
    if max_draft_tokens < 0:
        raise RequestRejected(
            f"max_draft_tokens is {max_draft_tokens}, at least 0 is needed", "max_draft_tokens"
        )
    if max_draft_tokens > 0 and config.drafter is None:
        raise RequestRejected(
            f"max_draft_tokens is {max_draft_tokens}, but this engine has no drafter: only 0",
            "max_draft_tokens",
        )


def _most_tokens(config: EngineConfig, message: GenerateRequest) -> int:
    return min(message.sampling.max_tokens, config.max_model_len - len(message.prompt_token_ids))


def _check_logit_bias(config: EngineConfig, logit_bias: Sequence[tuple[int, float]]) -> None:
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise RequestRejected(
            f"logit_bias holds {len(logit_bias)} tokens, the limit is {MAX_LOGIT_BIAS}",
            "logit_bias",
        )
    ids = [token_id for token_id, _ in logit_bias]
    check_token_ids(config, ids, "logit_bias")
    if len(set(ids)) < len(ids):
        raise RequestRejected("logit_bias names a token id twice", "logit_bias")
    for token_id, bias in logit_bias:
        if not -_LOGIT_BIAS <= bias <= _LOGIT_BIAS:
            raise RequestRejected(
                f"logit_bias of token {token_id} is {bias}, it must be from {-_LOGIT_BIAS} to "
                f"{_LOGIT_BIAS}",
                "logit_bias",
            )


def _check_guide(guide: Guide) -> None:
    if guide.kind == "json_object":
        if guide.source:
            raise RequestRejected("guide json_object takes no source", "guide")
    elif guide.kind not in _GUIDES_WITH_SOURCE:
        kinds = ", ".join(("json_object", *_GUIDES_WITH_SOURCE))
        raise RequestRejected(f"guide is {guide.kind!r}, it must be one of {kinds}", "guide")
    elif not guide.source:
        raise RequestRejected(f"guide {guide.kind} has an empty source", "guide")
