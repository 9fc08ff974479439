"""What an engine can serve at all. The server asks before it queues, the engine before it runs."""

from collections.abc import Sequence

from actors.config import EngineConfig
from actors.errors import PromptTooLong, RequestRejected
from actors.messages import GenerateRequest


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


def check_request(config: EngineConfig, message: GenerateRequest) -> None:
    """Raises `RequestRejected`, naming field, value and limit, for what could never be served.

    `max_tokens` may reach beyond the context: the output then ends where the context does.
    """
    sampling = message.sampling
    check_prompt(config, message.prompt_token_ids)
    check_token_ids(config, sampling.stop_token_ids, "stop_token_ids")
    if sampling.max_tokens < 1:
        raise RequestRejected(
            f"max_tokens is {sampling.max_tokens}, at least 1 is needed", "max_tokens"
        )
    if sampling.temperature != 0:
        raise RequestRejected(
            f"temperature is {sampling.temperature}, only 0 is supported", "temperature"
        )
    if not -(2**63) <= sampling.seed < 2**63:
        raise RequestRejected(f"seed is {sampling.seed}, it must fit into 64 bits", "seed")
