"""Exceptions -> OpenAI-shaped error responses. Nothing that a caller sends ends as a 5xx."""

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import InterfaceError, OperationalError, TimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app.errors import ApiError, InvalidRequest, NotFound, Unavailable

log = structlog.get_logger(__name__)


class MethodNotAllowed(InvalidRequest):
    status = 405


def install(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid_parameters)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    for database_error in (OperationalError, InterfaceError, TimeoutError):
        app.add_exception_handler(database_error, _database_unavailable)
    app.add_exception_handler(Exception, _internal_error)


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _invalid_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])  # after "path", "query" or "header"
    return error_response(InvalidRequest(f"'{name}' is not valid: {first['msg']}.", code="invalid_value", param=name))


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return error_response(
            MethodNotAllowed(
                f"{path} does not take {request.method[:20]}: use {allowed}.",
                code="method_not_allowed",
                headers=dict(error.headers or {}),
            )
        )
    if error.status_code == 404:
        return error_response(
            NotFound(f"There is nothing at {path}: /openapi.json lists every path.", code="unknown_path")
        )
    refused = InvalidRequest(str(error.detail), code="invalid_request")
    refused.status = error.status_code
    return error_response(refused)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _database_unavailable(request: Request, error: Exception) -> Response:
    log.error("database_unavailable", path=request.url.path, error=str(error))
    return error_response(
        Unavailable(
            "The database does not answer: try again in a few seconds.",
            code="store_unavailable",
            headers={"Retry-After": "5"},
        )
    )


async def _internal_error(request: Request, error: Exception) -> Response:
    # uvicorn logs the traceback: Starlette raises the error again behind this response
    return error_response(
        ApiError("The server failed in an unexpected way; its log says how. Try again.", code="internal_error")
    )
