"""The demo pair as the tests use it: prompts, engines and how tokens are compared."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from actors.llm import LLM
from benchmarks.lossless import NEAR_TIE, first_difference
from benchmarks.prompts import SAMPLE, load_prompts
from models.hub import DEMO_DRAFTER, DEMO_TARGET

USER_MESSAGE = "Explain photosynthesis in two sentences."
CONTINUATION = (
    "Photosynthesis is a vital biological process that converts carbon dioxide into organic "
    "molecules, such as glucose and oxygen, using energy from the sun. This process is essential "
    "for life on Earth, as it provides the primary energy source for nearly all ecosystems."
)

SPECULATIVE: dict[str, Any] = {"method": "dflash", "model": DEMO_DRAFTER}


def demo_args(**changes: Any) -> dict[str, Any]:
    """`EngineArgs` of the demo pair in float32, with room for the tests' short prompts.

    All have pools of the same size and prefill in rows of one width: then what one engine compiled
    serves the others.
    """
    return {
        "model": DEMO_TARGET,
        "speculative_config": SPECULATIVE,
        "dtype": "float32",
        "max_model_len": 512,
        "num_kv_pages": 8 * 32 + 1,
        "buckets": {"prefill_widths": [16]},
    } | changes


def num_prompts(default: int) -> int:
    """`DFLASH_TEST_PROMPTS`, which a full run sets to 20."""
    return int(os.environ.get("DFLASH_TEST_PROMPTS", default))


def short_texts(count: int, max_chars: int = 300) -> list[str]:
    """The first short rows of the sample that ships with the benchmarks, `count` of them."""
    texts = [row.text for row in load_prompts(SAMPLE) if len(row.text) <= max_chars]
    texts += [f"{text} Answer like a pirate." for text in texts]
    assert len(texts) >= count, f"the sample has {len(texts)} short prompts"
    return texts[:count]


def short_prompts(llm: LLM, count: int) -> list[list[int]]:
    """`short_texts` through the chat template."""
    return [llm.encode_chat([{"role": "user", "content": text}]) for text in short_texts(count)]


def assert_same_tokens(
    found: Sequence[int],
    expected: Sequence[int],
    prompt: Sequence[int],
    next_token_logits: Callable[[list[int]], Tensor],
) -> None:
    """Equal up to the first near-tie, where float32 rounding may decide; that one is printed."""
    index = first_difference(expected, found)
    if index is None:
        return
    logits = next_token_logits([*prompt, *expected[:index]])
    top = logits.topk(2).values
    margin = float((top[0] - top[1]) / logits.abs().max())
    assert margin < NEAR_TIE, f"token {index} differs at margin {margin:.2e}: {found} {expected}"
    print(f"excused near-tie at token {index}, margin {margin:.2e} of max|logit|")
