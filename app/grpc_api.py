"""The gRPC methods. Serve calls those of the ingress class that are named like the RPCs."""

import ipaddress
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from urllib.parse import unquote

from pydantic import ValidationError
from ray.serve.grpc_util import RayServegRPCContext

from actors.errors import RequestRejected
from app import openai
from app.errors import PeerRefused, to_fault
from app.generation import Chat, Finish, Generation, GenerationInput, Usage
from app.protos import dflash_pb2 as pb
from app.service import Service

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
            result = await generation.result()
            return pb.GenerateResponse(
                id=generation.request_id,
                text=result.text,
                token_ids=result.token_ids,
                finish_reason=_FINISH_REASONS[result.finish.reason],
                usage=_usage(result.finish.usage),
            )
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
                async for delta in generation.deltas:
                    yield _chunk(generation, delta.text, delta.token_ids, delta.finish)
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
                prompt=_prompt(request),
                max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
                stop=tuple(request.stop),
                stop_token_ids=tuple(request.stop_token_ids),
                ignore_eos=request.ignore_eos,
            )
        )


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


def _prompt(request: pb.GenerateRequest) -> str | tuple[int, ...] | Chat:
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
        raise openai.rejection(error.errors()) from None
    return Chat(tuple(message.for_template() for message in messages))


def _chunk(
    generation: Generation, text: str, token_ids: tuple[int, ...], finish: Finish | None
) -> pb.GenerateChunk:
    return pb.GenerateChunk(
        id=generation.request_id,
        text=text,
        token_ids=token_ids,
        finish_reason=_FINISH_REASONS[finish.reason] if finish else None,
        usage=_usage(finish.usage) if finish else None,
    )


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
    )


def _new_id() -> str:
    return f"grpc-{uuid.uuid4().hex}"


def _set_status(context: RayServegRPCContext, error: Exception, request_id: str) -> None:
    fault = to_fault(error, request_id)
    context.set_code(fault.kind.grpc_code)
    context.set_details(fault.message)
