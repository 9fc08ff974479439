"""Dedicated drafters on the demo pair: two target ranks and one drafter rank, on Ray."""

import asyncio
import os
import signal

from ray.serve.handle import DeploymentHandle

from actors.llm import LLM
from actors.messages import GenerateRequest, SamplingParams, TokenChunk
from tests.integration.demo import assert_same_tokens, demo_args, short_prompts
from tests.integration.routing import (
    chunks_of,
    engine_of,
    pids_of,
    routing,
    tokens_of,
    wait_until,
)

MAX_TOKENS = 24
# Greedy, and drawn.
TEMPERATURES = (0.0, 0.0, 0.8, 1.0)


def requests_of(prompts: list[list[int]], name: str) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"{name} {i}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=MAX_TOKENS, ignore_eos=True, temperature=temperature, seed=i
            ),
        )
        for i, (prompt, temperature) in enumerate(zip(prompts, TEMPERATURES, strict=True))
    ]


async def streams(
    router: DeploymentHandle, requests: list[GenerateRequest]
) -> list[list[TokenChunk]]:
    """One after the other: what a request verifies near its end depends on its company."""
    return [await chunks_of(router, request) for request in requests]


def test_tokens_and_acceptance_are_those_of_colocated_drafters(cluster: None, plain: LLM) -> None:
    prompts = short_prompts(plain, len(TEMPERATURES))
    args = demo_args(backend="eager", enable_prefix_caching=False)
    speculative = {**args["speculative_config"], "adaptive": False}
    args["speculative_config"] = speculative
    with LLM(**args) as llm:
        requests = requests_of(prompts, "alone")
        alike = [llm.generate([list(each.prompt_token_ids)], each.sampling)[0] for each in requests]
    args |= {"tensor_parallel_size": 2, "cpus_per_shard": 0.3}
    dedicated = {"placement": "dedicated", "tensor_parallel_size": 1}
    args["speculative_config"] = {**speculative, **dedicated}
    with routing("dedicated", args) as router:
        found = asyncio.run(streams(router, requests_of(prompts, "first")))
        for output, chunks, request in zip(alike, found, requests, strict=True):
            assert_same_tokens(
                tokens_of(chunks),
                output.token_ids,
                list(request.prompt_token_ids),
                plain.next_token_logits,
            )
            assert chunks[-1].speculation == output.speculation
        assert sum(output.speculation.accepted_tokens for output in alike) > 0

        # Killed in mid-stream, they cost drafts and no token.
        (drafter,) = pids_of("_RayDrafterShard")

        async def stream_with_a_death() -> list[TokenChunk]:
            chunks: list[TokenChunk] = []
            async for chunk in engine_of(router)(requests_of(prompts, "second")[0]):
                if not chunks:
                    os.kill(drafter, signal.SIGKILL)
                chunks.append(chunk)
            return chunks

        chunks = asyncio.run(stream_with_a_death())
        assert tokens_of(chunks) == tokens_of(found[0])
        assert chunks[-1].speculation.draft_tokens < found[0][-1].speculation.draft_tokens

        def are_back() -> bool:
            (chunks,) = asyncio.run(streams(router, requests_of(prompts, "third")[:1]))
            assert tokens_of(chunks) == tokens_of(found[0])
            return chunks[-1].speculation == found[0][-1].speculation

        wait_until(are_back, "speculation is back")
