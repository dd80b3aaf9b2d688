"""The FastAPI application: routes, keys, errors. What a route does is in its own file."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from sparring.backend.gateway.http import admin
from sparring.backend.gateway.http.chat_completions import chat_completions
from sparring.backend.gateway.http.errors import anthropic_error, openai_error
from sparring.backend.gateway.http.ledger import Ledger
from sparring.backend.gateway.http.messages import messages
from sparring.backend.gateway.http.metrics import GatewayMetrics
from sparring.backend.gateway.http.responses import responses
from sparring.backend.gateway.recorder import Recorder
from sparring.backend.gateway.session import Session
from sparring.errors import GatewayError, SparringError

__all__ = ["make_app"]

_RETRY_AFTER_S = "1"
_SessionRoute = Callable[[Request, Session], Awaitable[Response]]


def make_app(recorder: Recorder, ledger: Ledger, *, admin_key: str) -> FastAPI:
    """The application over a recorder."""
    app = FastAPI(title="sparring gateway", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = GatewayMetrics(recorder)

    def session_of(request: Request) -> Session:
        key = _key(request)
        session = recorder.session_for(key)
        if session is not None:
            return session
        if hmac.compare_digest(key.encode(), admin_key.encode()):
            raise GatewayError("the admin key names no session: use the key that /rl/start_session gave")
        if ledger.has_ended(key):
            raise GatewayError("this key's session has ended", status=410)
        raise GatewayError("this key names no open session", status=401)

    def check_admin(request: Request) -> None:
        if not hmac.compare_digest(_key(request).encode(), admin_key.encode()):
            raise GatewayError("this route needs the admin key", status=403)

    def serve(
        paths: tuple[str, ...], handler: Callable[[Request], Awaitable[Response]], method: str = "POST"
    ) -> None:
        async def route(request: Request) -> Response:
            began, status = time.perf_counter(), 500
            try:
                response = await handler(request)
                status = response.status_code
                return response
            except (SparringError, RecursionError) as error:
                if isinstance(error, RecursionError):  # read by one step, and too deep for the next
                    error = GatewayError("the request is nested too deeply")
                response = _error_response(request, error)
                status = response.status_code
                return response
            finally:
                metrics.requests.labels(paths[0], status).inc()
                metrics.seconds.labels(paths[0]).observe(time.perf_counter() - began)

        for path in paths:
            app.add_route(path, route, methods=[method])

    def with_session(route: _SessionRoute) -> Callable[[Request], Awaitable[Response]]:
        async def routed(request: Request) -> Response:
            return await route(request, session_of(request))

        return routed

    async def start_session(request: Request) -> Response:
        check_admin(request)
        return await admin.start_session(request, recorder, ledger, admin_key)

    async def grant_capacity(request: Request) -> Response:
        check_admin(request)
        return await admin.grant_capacity(ledger)

    async def export_trajectories(request: Request) -> Response:
        check_admin(request)
        return await admin.export_trajectories(request, ledger)

    async def end_session(request: Request) -> Response:
        return await admin.end_session(session_of(request), ledger)

    serve(("/v1/chat/completions", "/chat/completions"), with_session(chat_completions))
    serve(("/v1/responses", "/responses"), with_session(responses))
    serve(("/v1/messages",), with_session(messages))
    serve(("/rl/set_reward",), with_session(admin.set_reward))
    serve(("/rl/end_session",), end_session)
    serve(("/rl/start_session",), start_session)
    serve(("/grant_capacity",), grant_capacity)
    serve(("/export_trajectories",), export_trajectories)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name) for name in recorder.model_names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        recorder.policy_for(name)
        return JSONResponse(_model(name))

    serve(("/v1/models", "/models"), models, "GET")
    serve(("/v1/models/{name:path}", "/models/{name:path}"), model, "GET")

    @app.get("/health")
    async def health() -> Response:
        try:
            state = await recorder.engine.health()
        except SparringError as error:
            return JSONResponse({"status": "failed", "detail": str(error)}, status_code=503)
        document = {
            "status": "ok" if state.ok else "failed",
            "version": state.version,
            "running": state.running,
            "waiting": state.waiting,
            "sessions": len(recorder.sessions),
            "detail": state.detail,
        }
        return JSONResponse(document, status_code=200 if state.ok else 503)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    return app


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "sparring"}


def _key(request: Request) -> str:
    header = request.headers.get("authorization", "")
    key = header[7:].strip() if header[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
    if not key:
        raise GatewayError("no api key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'", status=401)
    return key


def _error_response(request: Request, error: SparringError) -> Response:
    shape = anthropic_error if request.url.path.endswith("/messages") else openai_error
    status, document = shape(error)
    headers = {"retry-after": _RETRY_AFTER_S} if status == 429 else {}
    return JSONResponse(document, status_code=status, headers=headers)
