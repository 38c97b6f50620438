"""Every failure leaves as OpenAI's error object, with a status that tells the client whose turn it is.

400 and 404: the request must change. 401: a key is missing. 429 and 503: the same request may work later
(`Retry-After`). 500: a defect of Strata.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from strata.errors import CapacityError, ConfigError, RequestError, StrataError
from strata.serve.request_id import HEADER, current_request_id

_log = logging.getLogger("strata.serve")
_RETRY_AFTER_S = "1"


class ApiError(Exception):
    """A failure as the client sees it: HTTP status, sentence, and OpenAI's `type`, `code` and `param`."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON object, in OpenAI's shape."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        # What clients sent may be quoted in it, and may be no valid text.
        message = str(self).encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole HTTP answer."""
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = _RETRY_AFTER_S
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def api_error_of(error: StrataError) -> ApiError:
    """How an error of the engine looks to the client."""
    if isinstance(error, RequestError):
        return ApiError(400, str(error), "invalid_value", error.field)
    # What is set while the server runs is set by a request.
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), "invalid_value")
    if isinstance(error, CapacityError):
        return ApiError(429, str(error), "queue_full")
    return ApiError(503, str(error), "unavailable")


def add_error_handlers(app: FastAPI) -> None:
    """Gives every failure of the app OpenAI's shape."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(StrataError, _on_strata_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_defect)


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_strata_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StrataError)
    return api_error_of(error).response()


async def _on_invalid_body(request: Request, error: Exception) -> JSONResponse:
    """One sentence about one thing wrong; pydantic's list of everything helps nobody over HTTP. The innermost one: a
    value that may have several forms is wrong for each, and farthest inside for the form that was meant."""
    assert isinstance(error, RequestValidationError)
    found = [
        (_place(each["loc"][1:], error.body, each["type"] == "missing"), each) for each in error.errors()
    ]
    where, fault = max(found, key=lambda each: len(each[0]))
    if fault["type"] == "json_invalid":
        return ApiError(
            400, f"the body is not valid JSON: {fault['ctx']['error']}", "invalid_json"
        ).response()
    if not where:
        return ApiError(
            400, "the body must be a JSON object, sent with `Content-Type: application/json`"
        ).response()
    what = fault["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{'.'.join(where)}: {what}", "invalid_value", where[0]).response()


def _place(parts: Sequence[int | str], body: Any, missing: bool) -> list[str]:
    """What of pydantic's location the body has, and the field that it lacks. Between these pydantic writes which of the
    forms that a value may have it tried, which tells a client nothing."""
    place, value = [], body
    for part in parts:
        try:
            value = value[part]
        except (LookupError, TypeError):
            continue
        place.append(str(part))
    if missing:
        place += map(str, parts[-1:])
    return place


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    message = f"{asked}: {error.detail}"
    if error.status_code == 404:
        message = f"{asked} is not served here; /openapi.json lists what is"
    allowed = (error.headers or {}).get("Allow")
    response = ApiError(error.status_code, f"{message}; use {allowed}" if allowed else message).response()
    response.headers.update(error.headers or {})
    return response


async def _on_defect(request: Request, error: Exception) -> JSONResponse:
    request_id = current_request_id()
    _log.error("%s %s failed (request %s)", request.method, request.url.path, request_id, exc_info=error)
    sentence = f"internal error ({type(error).__name__}); the server's log has the details"
    response = ApiError(500, sentence).response()
    # Starlette answers this one outside of every middleware.
    response.headers[HEADER] = request_id
    # The server cuts the connection after it: a client that kept it would lose its next request.
    response.headers["Connection"] = "close"
    return response
