import logging

import grpc
import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from actors.errors import EngineDead, EngineOverloaded, PromptTooLong, RequestRejected
from app.errors import PeerRefused, to_fault
from app.service import ModelNotFound


@pytest.mark.parametrize(
    ("error", "http_status", "grpc_code"),
    [
        (RequestRejected("no", "n"), 400, grpc.StatusCode.INVALID_ARGUMENT),
        (PromptTooLong("long", "prompt"), 400, grpc.StatusCode.INVALID_ARGUMENT),
        (ModelNotFound("who", "model"), 404, grpc.StatusCode.NOT_FOUND),
        (PeerRefused("far"), 403, grpc.StatusCode.PERMISSION_DENIED),
        (BackPressureError(1, 1), 503, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (EngineOverloaded("full"), 503, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (EngineDead("gone"), 503, grpc.StatusCode.UNAVAILABLE),
        (ActorDiedError(), 503, grpc.StatusCode.UNAVAILABLE),
        (
            DeploymentUnavailableError(DeploymentID(name="Router")),
            503,
            grpc.StatusCode.UNAVAILABLE,
        ),
        (ValueError("secret"), 500, grpc.StatusCode.INTERNAL),
        (KeyError("secret"), 500, grpc.StatusCode.INTERNAL),
    ],
)
def test_every_error_has_one_place(
    error: Exception, http_status: int, grpc_code: grpc.StatusCode
) -> None:
    across_ray = RayTaskError("generate", "a traceback", error)
    for raised in (error, across_ray, across_ray.as_instanceof_cause()):
        fault = to_fault(raised, "r-1")
        assert (fault.kind.http_status, fault.kind.grpc_code) == (http_status, grpc_code)
        assert "traceback" not in fault.message
        assert fault.param == getattr(error, "param", None)


def test_an_unexpected_error_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        fault = to_fault(ValueError("secret"), "r-1")
    assert "secret" not in fault.message
    assert "r-1" in fault.message
    assert "r-1" in caplog.text
    assert "secret" in caplog.text


def test_a_rejection_is_told_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    fault = to_fault(RequestRejected("n is 2", "n"), "r-1")
    assert (fault.message, fault.param) == ("n is 2", "n")
    assert caplog.text == ""


def test_overload_says_when_to_come_back() -> None:
    assert to_fault(BackPressureError(1, 1), "r-1").kind.retry_after_s == 1
    assert to_fault(EngineOverloaded("full"), "r-1").kind.retry_after_s == 1
