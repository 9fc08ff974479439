"""Failed HTTP requests, answered in OpenAI's shape."""

import json
from collections.abc import Mapping

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import responses
from app.errors import to_fault
from app.strict import rejection


class FaultMiddleware:
    """Answers with the table's fault where the application raised before it answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answered = False

        async def watch(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            if answered:
                raise
            await _fault_response(error, HTTPConnection(scope))(scope, receive, send)


async def invalid_body(request: Request, error: Exception) -> Response:
    """400: the schema did not take the body."""
    assert isinstance(error, RequestValidationError)
    found = [{**e, "loc": e["loc"][1:]} for e in error.errors()]  # each begins with "body"
    return _fault_response(rejection(found), request)


async def no_such_route(request: Request, error: Exception) -> Response:
    """404, 405, and bodies that are not even text: the router's own errors have a status."""
    assert isinstance(error, HTTPException)
    detail = responses.ErrorDetail(
        message=f"{error.detail} ({request.method} {request.url.path})",
        type="invalid_request_error",
        param=None,
        code=None,
    )
    return _error_response(responses.ErrorBody(error=detail), error.status_code, error.headers)


def _fault_response(error: Exception, connection: HTTPConnection) -> Response:
    fault = to_fault(error, request_id_of(connection))
    wait_s = fault.kind.retry_after_s
    headers = None if wait_s is None else {"retry-after": str(wait_s)}
    return _error_response(responses.error_body(fault), fault.kind.http_status, headers)


def _error_response(
    body: responses.ErrorBody, status: int, headers: Mapping[str, str] | None
) -> Response:
    """ASCII only: a message may quote what the client sent, be it valid Unicode or not."""
    content = json.dumps(body.model_dump())
    return Response(content, status, headers, media_type="application/json")


def request_id_of(connection: HTTPConnection) -> str:
    """What the proxy calls this request."""
    return connection.headers.get("x-request-id", "without id")
