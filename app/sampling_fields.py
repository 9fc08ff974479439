"""How a client wants its output sampled: OpenAI's fields, and vLLM's beside them."""

from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field

from actors.errors import RequestRejected
from actors.limits import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_LOGPROBS
from actors.messages import SamplingParams
from app.response_format import GuideFields
from app.strict import Text

DEFAULT_TEMPERATURE = 1.0
MAX_CHOICES = 32


def _is_token_id(name: str) -> str:
    """Neither signs nor spaces nor a second spelling of the same id."""
    if not (name.isascii() and name.isdigit() and (name == "0" or name[0] != "0")):
        raise RequestRejected(f"{name!r:.80} is not a token id")
    return name


def _not_blank(word: str) -> str:
    if not word.strip():
        raise RequestRejected("a bad word is blank")
    return word


_Finite = Field(allow_inf_nan=False)
_Probability = Annotated[float, _Finite, Field(ge=0, le=1)]
_Penalty = Annotated[float, _Finite, Field(ge=-2, le=2)]
_Bias = Annotated[float, _Finite, Field(ge=-100, le=100)]
_TokenId = Annotated[str, Field(max_length=19), AfterValidator(_is_token_id)]
_Word = Annotated[Text, AfterValidator(_not_blank)]
_Stop = Annotated[Text, Field(min_length=1)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class SamplingFields(GuideFields):
    """The fields that both endpoints share. Null is the same as absent."""

    temperature: Annotated[float, _Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, _Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: _Probability | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, _Finite, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    bad_words: Annotated[list[_Word], Field(max_length=MAX_BAD_WORDS)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: NumLogprobs | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each emitted token; None reports no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt."""
        return self.prompt_logprobs

    @property
    def sampling(self) -> partial[SamplingParams]:
        """All but what depends on the prompt, the tokenizer or the choice."""
        bias = self.logit_bias or {}
        return partial(
            SamplingParams,
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple((int(token_id), value) for token_id, value in bias.items()),
            min_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            guide=self.guide,
        )
