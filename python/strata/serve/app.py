"""The ASGI application: routes, error shapes, metrics and the key, around one engine."""

from __future__ import annotations

from fastapi import FastAPI

from strata import __version__
from strata.config import StrataConfig
from strata.engine.api import EngineProtocol
from strata.serve.admin import admin_router
from strata.serve.auth import BearerAuth
from strata.serve.chat import chat_router
from strata.serve.completions import completions_router
from strata.serve.errors import add_error_handlers
from strata.serve.metrics import HttpMetrics, ServerMetrics
from strata.serve.page_routes import page_router
from strata.serve.request_id import RequestIds
from strata.serve.service import Service
from strata.serve.status import status_router
from strata.serve.tokens import tokens_router


def create_app(engine: EngineProtocol, config: StrataConfig) -> FastAPI:
    """An app that serves `engine`. The caller owns the engine and shuts it down after the app has stopped."""
    service = Service(engine, config, ServerMetrics(engine, config))
    service.metrics.watch_readiness(lambda: service.readiness().ready)
    app = FastAPI(title="Strata", version=__version__)
    app.state.service = service
    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    app.include_router(tokens_router(service))
    app.include_router(admin_router(service))
    app.include_router(status_router(service))
    app.include_router(page_router())
    add_error_handlers(app)
    if config.server.api_key:
        app.add_middleware(BearerAuth, api_key=config.server.api_key)
    app.add_middleware(HttpMetrics, metrics=service.metrics)
    app.add_middleware(RequestIds)
    return app
