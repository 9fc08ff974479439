"""What a cached prefix saves: time to the first token of one long beginning, cold and cached.

`python -m benchmarks.prefix_cache`; the last line is JSON, the exit status 1 where a token differs.
"""

import json
import statistics
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from actors.llm import LLM, RequestOutput
from actors.messages import SamplingParams
from benchmarks import options
from benchmarks.prompts import SAMPLE
from models.hub import DEMO_DRAFTER, DEMO_TARGET


def ttft_ms(outputs: list[RequestOutput]) -> float:
    """The median time to the first token."""
    times = (o.timing.first_token_at - o.timing.submitted_at for o in outputs)
    return 1000 * statistics.median(times)


def acceptance_lengths(outputs: list[RequestOutput]) -> list[float | None]:
    return [output.speculation.mean_acceptance_length for output in outputs]


def main(
    file: Annotated[
        Path, typer.Option(help="JSONL with `turns`, whose texts make the beginnings.")
    ] = SAMPLE,
    tokens: Annotated[int, typer.Option(min=32, help="Length of a shared beginning.")] = 1800,
    rounds: Annotated[int, typer.Option(min=1, help="Beginnings, each run twice.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens per prompt.")] = 32,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    model: Annotated[str, typer.Option(help="Target.")] = DEMO_TARGET,
    drafter: Annotated[str, typer.Option(help="Drafter.")] = DEMO_DRAFTER,
) -> None:
    """Run prompts that begin alike one after the other, then without a cache."""
    options.check_dtype(dtype)
    texts = options.read_texts(file, None)
    sampling = SamplingParams(max_tokens=max_tokens)
    args: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_num_seqs": 1,
        "speculative_config": {"method": "dflash", "model": drafter, "adaptive": False},
    }
    with LLM(**args) as llm:
        llm.warm_up()
        stream = [token for text in texts for token in llm.tokenizer.encode(text)]
        cold, cached = [], []
        for i in range(rounds):
            start = i * len(stream) // rounds
            prompt = list(islice(cycle(stream), start, start + tokens))
            cold += llm.generate([prompt], sampling)
            cached += llm.generate([prompt], sampling)
    with LLM(**args, enable_prefix_caching=False) as llm:
        never = llm.generate([output.prompt_token_ids for output in cold], sampling)
    token_ids = [[output.token_ids for output in each] for each in (cold, cached, never)]
    lengths = [acceptance_lengths(each) for each in (cold, cached, never)]
    result = {
        "prompt_tokens": tokens,
        "cached_tokens": min(output.cached_tokens for output in cached),
        "ttft_cold_ms": round(ttft_ms(cold), 2),
        "ttft_cached_ms": round(ttft_ms(cached), 2),
        "ratio": round(ttft_ms(cold) / ttft_ms(cached), 2),
        "same_tokens": token_ids[0] == token_ids[1] == token_ids[2],
        "same_acceptance": lengths[0] == lengths[1] == lengths[2],
    }
    print(json.dumps(result))
    raise typer.Exit(0 if result["same_tokens"] and result["same_acceptance"] else 1)


if __name__ == "__main__":
    typer.run(main)
