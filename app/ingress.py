"""The Serve deployment that clients meet: HTTP and gRPC in front of the router."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from fastapi import FastAPI
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from actors.config import EngineConfig
from actors.messages import GenerateRequest, TokenChunk
from app.grpc_api import GrpcApi
from app.http_api import HttpApi
from app.protos import dflash_pb2 as pb
from app.resume import resuming
from app.service import Engine, Service
from app.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve")


@serve.ingress()
class OpenAIServer:
    """Stateless: any number of replicas. `remote_grpc` opens gRPC to other machines.

    `report_wait` logs why the router is not placed yet; it can't say so itself.
    """

    def __init__(
        self,
        router: DeploymentHandle,
        config: EngineConfig,
        report_wait: Callable[[], None],
        remote_grpc: bool = False,
    ) -> None:
        self._router = router
        self._report_wait = report_wait
        self._service = Service(
            config, Tokenizer.load(config.target_path), resuming(engine_of(router))
        )
        self._grpc = GrpcApi(self._service, remote=remote_grpc)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return HttpApi(self._service, self._check_router).build()

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> pb.GenerateResponse:
        return await self._grpc.generate(request, grpc_context)

    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        stream = self._grpc.generate_stream(request, grpc_context)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            await stream.aclose()

    async def check_health(self) -> None:
        """Serve's own health check. This replica is well; is the router placed?"""
        try:
            await asyncio.to_thread(self._report_wait)
        except Exception:
            logger.exception("could not see whether the router is placed")

    async def _check_router(self) -> None:
        await self._router.check.remote()


def engine_of(router: DeploymentHandle) -> Engine:
    """The router as the service sees it: closing the stream cancels the request."""
    streaming = router.options(stream=True)

    async def generate(request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        response = streaming.generate.remote(request)
        try:
            async for chunk in response:
                yield chunk
        finally:
            response.cancel()

    return generate
