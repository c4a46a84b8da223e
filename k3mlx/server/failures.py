"""Errors as OpenAI's clients know them. Owns the type and its JSON; says nothing about when one is due."""

from __future__ import annotations

from typing import Any

from k3mlx.errors import K3Error, UsageError


class ApiError(Exception):
    """A request that is not answered: HTTP status, message, and the parameter at fault, if one is."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        # a lone surrogate quoted from a request has no UTF-8 form
        message = self.message.encode("utf-8", "backslashreplace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A body that cannot be used."""
    return ApiError(400, message, param=param, code=code)


def from_error(error: K3Error) -> ApiError:
    """What a client is told about an error of the model's side."""
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    return ApiError(500, str(error))
