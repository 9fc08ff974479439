"""The gRPC methods. Serve calls those of the ingress class that are named like the RPCs."""

import ipaddress
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any
from urllib.parse import unquote

from pydantic import ValidationError
from ray.serve.grpc_util import RayServegRPCContext

from actors.errors import RequestRejected
from actors.messages import Guide, SamplingParams, TokenLogprobs
from app import openai
from app.errors import PeerRefused, to_fault
from app.generation import Chat, Delta, Generation, GenerationInput, Prompt, Usage
from app.protos import dflash_pb2 as pb
from app.response_format import choice_guide
from app.sampling_fields import DEFAULT_TEMPERATURE
from app.service import Service
from app.strict import rejection
from app.token_bytes import TokenBytes

_FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class GrpcApi:
    """The RPCs of `dflash.v1.DFlash`.

    Serve's gRPC proxy listens on every interface and has no authentication, so peers on other
    machines are refused unless `remote` says otherwise.
    """

    def __init__(self, service: Service, *, remote: bool) -> None:
        self._service = service
        self._remote = remote

    async def generate(
        self, request: pb.GenerateRequest, context: RayServegRPCContext
    ) -> pb.GenerateResponse:
        """Raises whatever went wrong, after its status was set on `context`."""
        request_id = _new_id()
        try:
            generation = await self._start(request, request_id, context)
            (whole,) = await generation.result()
            return pb.GenerateResponse(**self._fields(generation, whole))
        except Exception as error:
            _set_status(context, error, request_id)
            raise

    async def generate_stream(
        self, request: pb.GenerateRequest, context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """Raises whatever went wrong, after its status was set on `context`."""
        request_id = _new_id()
        try:
            generation = await self._start(request, request_id, context)
            async with aclosing(generation.deltas):
                async for _, delta in generation.deltas:
                    yield pb.GenerateChunk(**self._fields(generation, delta))
        except Exception as error:
            _set_status(context, error, request_id)
            raise

    async def _start(
        self, request: pb.GenerateRequest, request_id: str, context: RayServegRPCContext
    ) -> Generation:
        if not self._remote and not is_local(context.peer()):
            raise PeerRefused("gRPC is open to this machine only (remote_grpc is off)")
        if request.HasField("model"):
            self._service.check_model(request.model)
        if not all(request.stop):
            raise RequestRejected("stop holds an empty string", "stop")
        return await self._service.start(
            GenerationInput(
                request_id=request_id,
                prompts=(_prompt(request),),
                sampling=_sampling(request),
                max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
                seed=request.seed if request.HasField("seed") else None,
                bad_words=tuple(request.bad_words),
                stop=tuple(request.stop),
                priority=request.priority,
                cache_salt=request.cache_salt,
                max_draft_tokens=(
                    request.max_draft_tokens if request.HasField("max_draft_tokens") else None
                ),
            )
        )

    def _fields(self, generation: Generation, delta: Delta) -> dict[str, Any]:
        """The fields that a response and a chunk have in common."""
        (prompt,) = generation.prompts
        tokens = self._service.tokenizer.token_bytes
        finish = delta.finish
        return {
            "id": generation.request_id,
            "text": delta.text,
            "token_ids": delta.token_ids,
            "finish_reason": _FINISH_REASONS[finish.reason] if finish else None,
            "usage": _usage(finish.usage) if finish else None,
            "logprobs": _logprobs(tokens, delta.token_ids, delta.logprobs),
            "prompt_logprobs": _logprobs(tokens, prompt, delta.prompt_logprobs),
        }


def is_local(peer: str) -> bool:
    """Whether a gRPC peer (`ipv4:127.0.0.1:50000`, `ipv6:[::1]:50000`) is on this machine."""
    kind, _, address = unquote(peer).partition(":")
    if kind in ("unix", "unix-abstract"):
        return True
    if kind not in ("ipv4", "ipv6"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def _prompt(request: pb.GenerateRequest) -> Prompt:
    """Raises `RequestRejected` where there is none, or a message is not one."""
    kind = request.WhichOneof("input")
    if kind == "prompt":
        return request.prompt
    if kind == "token_ids":
        return tuple(request.token_ids.ids)
    if kind is None or not request.messages.messages:
        raise RequestRejected("one of messages, prompt and token_ids is required", "input")
    try:
        messages = [
            openai.Message.model_validate({"role": m.role, "content": m.content})
            for m in request.messages.messages
        ]
    except ValidationError as error:
        raise rejection(error.errors()) from None
    return Chat(tuple(message.for_template() for message in messages))


def _sampling(request: pb.GenerateRequest) -> partial[SamplingParams]:
    """Raises `RequestRejected` where there is a guide of no kind."""
    return partial(
        SamplingParams,
        temperature=(
            request.temperature if request.HasField("temperature") else DEFAULT_TEMPERATURE
        ),
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        top_k=0 if request.top_k == -1 else request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=(
            request.repetition_penalty if request.HasField("repetition_penalty") else 1.0
        ),
        logit_bias=tuple(request.logit_bias.items()),
        min_tokens=request.min_tokens,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        guide=_guide(request.guide) if request.HasField("guide") else None,
    )


def _guide(guide: pb.Guide) -> Guide | None:
    kind = guide.WhichOneof("kind")
    if kind is None:
        raise RequestRejected("one of the kinds of guide is required", "guide")
    if kind == "json_object":
        return Guide(kind="json_object") if guide.json_object else None
    if kind == "choices":
        if not guide.choices.choices or not all(guide.choices.choices):
            raise RequestRejected("choices holds an empty string, or none", "guide.choices")
        return choice_guide(guide.choices.choices)
    return Guide(kind=kind, source=getattr(guide, kind))


def _logprobs(
    tokens: TokenBytes, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[pb.TokenLogprobs]:
    if not logprobs:
        return []
    return [
        pb.TokenLogprobs(
            token_id=token_id,
            token=tokens(token_id),
            logprob=at.logprob if at else None,
            rank=at.rank if at else None,
            top=[
                pb.TopLogprob(token_id=other, token=tokens(other), logprob=logprob)
                for other, logprob in (at.top if at else ())
            ],
        )
        for token_id, at in zip(token_ids, logprobs, strict=True)
    ]


def _usage(usage: Usage) -> pb.Usage:
    stats = usage.speculation
    speculative = None
    if stats is not None:
        speculative = pb.Speculative(
            verify_steps=stats.verify_steps,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            mean_acceptance_length=stats.mean_acceptance_length,
        )
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        speculative=speculative,
        cached_tokens=usage.cached_tokens,
    )


def _new_id() -> str:
    return f"grpc-{uuid.uuid4().hex}"


def _set_status(context: RayServegRPCContext, error: Exception, request_id: str) -> None:
    fault = to_fault(error, request_id)
    context.set_code(fault.kind.grpc_code)
    context.set_details(fault.message)
