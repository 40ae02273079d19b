"""Errors that reach a caller: an HTTP status, OpenAI's error body, a code, and a sentence that says what to do.

The shape is that of https://platform.openai.com/docs/guides/error-codes: {"error": {message, type, param, code}}.
Lower layers raise these without knowing of HTTP frameworks; app/main.py turns them into responses.
"""


class ApiError(Exception):
    status = 500
    type = "server_error"

    def __init__(self, message: str, *, code: str, param: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(ApiError):
    status = 401
    type = "authentication_error"


class Forbidden(ApiError):
    status = 403
    type = "permission_error"


class NotFound(ApiError):
    status = 404
    type = "not_found_error"


class Conflict(ApiError):
    """OpenAI's SDKs send a 409 again by themselves. They read a header that says whether that helps: here it does not,
    unless `headers` says otherwise."""

    status = 409
    type = "conflict_error"

    def __init__(self, message: str, *, code: str, param: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message, code=code, param=param, headers={"x-should-retry": "false"} | (headers or {}))


class RateLimited(ApiError):
    status = 429
    type = "rate_limit_error"


class EngineFailed(ApiError):
    """The engine could not answer (unreachable, or an error of its own)."""

    status = 502
    type = "server_error"


class Unavailable(ApiError):
    status = 503
    type = "server_error"
