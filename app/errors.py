"""What a failed request looks like to its client: the one table for HTTP and gRPC."""

import logging
from dataclasses import dataclass

import grpc
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)

from actors.errors import EngineDead, EngineOverloaded, PromptTooLong, RequestRejected
from app.service import ModelNotFound

logger = logging.getLogger(__name__)


class PeerRefused(Exception):
    """The connection comes from another machine, and that was not allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One row of the table. `message` replaces the exception's own, which is not for clients."""

    http_status: int
    grpc_code: grpc.StatusCode
    type: str
    code: str | None = None
    message: str | None = None
    retry_after_s: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A failed request, ready to be written in either protocol."""

    kind: Kind
    message: str
    param: str | None = None


_REJECTED = Kind(
    http_status=400, grpc_code=grpc.StatusCode.INVALID_ARGUMENT, type="invalid_request_error"
)
_UNAVAILABLE = Kind(
    http_status=503,
    grpc_code=grpc.StatusCode.UNAVAILABLE,
    type="server_error",
    code="engine_unavailable",
    message="the engine is not available, try again later",
)
_OVERLOADED = Kind(
    http_status=503,
    grpc_code=grpc.StatusCode.RESOURCE_EXHAUSTED,
    type="server_error",
    code="overloaded",
    message="the server is overloaded, try again later",
    retry_after_s=1,
)
_INTERNAL = Kind(
    http_status=500,
    grpc_code=grpc.StatusCode.INTERNAL,
    type="server_error",
    code="internal_error",
    message="internal error",
)

# The first row that fits counts, so subclasses stand before their base.
_TABLE: tuple[tuple[type[BaseException], Kind], ...] = (
    (
        ModelNotFound,
        Kind(
            http_status=404,
            grpc_code=grpc.StatusCode.NOT_FOUND,
            type="invalid_request_error",
            code="model_not_found",
        ),
    ),
    (
        PromptTooLong,
        Kind(
            http_status=400,
            grpc_code=grpc.StatusCode.INVALID_ARGUMENT,
            type="invalid_request_error",
            code="context_length_exceeded",
        ),
    ),
    (RequestRejected, _REJECTED),
    (
        PeerRefused,
        Kind(
            http_status=403,
            grpc_code=grpc.StatusCode.PERMISSION_DENIED,
            type="permission_error",
        ),
    ),
    (EngineOverloaded, _OVERLOADED),
    (BackPressureError, _OVERLOADED),
    (EngineDead, _UNAVAILABLE),
    (DeploymentUnavailableError, _UNAVAILABLE),
    (ReplicaUnavailableError, _UNAVAILABLE),
    (RayActorError, _UNAVAILABLE),
)


def unwrap(error: BaseException) -> BaseException:
    """The exception that was raised on the other side of a Ray call."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def to_fault(error: BaseException, request_id: str) -> Fault:
    """What to tell the client about `error`.

    An error that is not in the table is ours: it is logged with its traceback, and the client
    learns no more than `request_id`.
    """
    error = unwrap(error)
    for types, kind in _TABLE:
        if isinstance(error, types):
            param = error.param if isinstance(error, RequestRejected) else None
            return Fault(kind=kind, message=kind.message or str(error), param=param)
    logger.error("request %s failed", request_id, exc_info=error)
    return Fault(kind=_INTERNAL, message=f"{_INTERNAL.message} (request {request_id})")
