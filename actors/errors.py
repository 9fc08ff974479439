"""What can go wrong, by whose fault it is. `app.errors` maps these to HTTP and gRPC codes."""


class ConfigError(ValueError):
    """The configuration can't be served. The message is one line naming field, value and limit."""


class RequestRejected(ValueError):
    """The client's request can't be served as it stands.

    `param` is the request field at fault, None where it is the request as a whole.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class PromptTooLong(RequestRejected):
    """The prompt leaves no room for a single token of output."""


class EngineOverloaded(RuntimeError):
    """The engine has as many requests as it takes; the client may try again later."""


class EngineDead(RuntimeError):
    """The engine can't go on; every stream it carried ends with this."""


class ShardsLost(EngineDead):
    """A rank failed or did not answer in time, and all were ended. Others may go on from what was
    emitted."""
