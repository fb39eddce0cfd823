"""The server as an ASGI app: its routes, and the form of its errors."""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from nanoengine.server.anthropic_api import count_tokens, messages
from nanoengine.server.keys_and_limits import Gate
from nanoengine.server.openai_api import APIError
from nanoengine.server.responses import responses
from nanoengine.server.service import Service


def make_app(service: Service, allowed_origins: Sequence[str] = ()) -> FastAPI:
    """Return the service as an ASGI app, which web pages from `allowed_origins` ("*": any) may call."""
    app = FastAPI(title="nanoengine", openapi_url=None)  # FastAPI's docs pages load scripts from elsewhere
    app.state.service = service
    app.add_middleware(Gate, service=service)
    if allowed_origins:  # outside the gate, because a browser's preflight request has no key
        any_of: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, **any_of)
    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("POST", "/v1/completions", service.completions),
        ("POST", "/v1/chat/completions", service.chat),
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{name:path}", service.model),
        ("POST", "/tokenize", service.tokenize),
        ("POST", "/detokenize", service.detokenize),
        ("GET", "/health", service.health),
        ("GET", "/ping", service.health),
        ("POST", "/ping", service.health),
        ("GET", "/version", service.version),
        ("GET", "/server_info", service.server_info),
        ("GET", "/metrics", service.metrics),
        ("GET", "/", service.page),
        ("POST", "/v1/responses", responses),
        ("POST", "/v1/messages", messages),
        ("POST", "/v1/messages/count_tokens", count_tokens),
    ]
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method])
    paths = sorted({route.path for route in app.routes if isinstance(route, APIRoute)})

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = misshapen(error)
        elif isinstance(error, HTTPException):
            headers = {"allow": error.headers["Allow"]} if error.headers and "Allow" in error.headers else {}
            is_unknown = error.status_code == 404
            message = f"{request.url.path} does not exist; the paths are {', '.join(paths)}"
            error = APIError(error.status_code, message if is_unknown else str(error.detail), **headers)
        elif not isinstance(error, APIError):
            error = APIError(500, "the server failed")  # the reason is in the server's log only
        request.state.ticket.error = error.code
        return error.response(request.url.path)

    for kind in (APIError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    return app


def misshapen(error: RequestValidationError) -> APIError:
    """Return the APIError for a body that is not JSON, or that has fields of the wrong type."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not JSON: {first['ctx']['error']} at character {where[0]}")
    if not where:
        return APIError(400, "the body must be a JSON object, sent as Content-Type: application/json")
    return APIError(400, f"{'.'.join(where)}: {first['msg']}", param=where[0])
