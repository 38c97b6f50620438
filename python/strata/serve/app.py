"""The ASGI application: routes, error shapes, metrics, access and limits, around one engine."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from strata import __version__
from strata.config import StrataConfig
from strata.engine.api import EngineProtocol
from strata.serve.access import AccessControl
from strata.serve.admin import admin_router
from strata.serve.chat import chat_router
from strata.serve.completions import completions_router
from strata.serve.documented import FAILURES
from strata.serve.errors import add_error_handlers
from strata.serve.limits import Limits
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
    # The pages that FastAPI has for a browser run scripts of another site on this origin.
    app = FastAPI(title="Strata", version=__version__, docs_url=None, redoc_url=None, responses=FAILURES)
    app.state.service = service
    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    app.include_router(tokens_router(service))
    app.include_router(admin_router(service))
    app.include_router(status_router(service))
    app.include_router(page_router())
    add_error_handlers(app)
    # Each is put around those before it.
    app.add_middleware(Limits, options=config.server)
    app.add_middleware(AccessControl, options=config.server)
    if config.server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            # As browsers spell them.
            allow_origins=[origin.lower() for origin in config.server.allowed_origins],
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After", "X-Request-Id"),
            # Whoever names a public page here means it to reach this server, most of all one on loopback.
            allow_private_network=True,
        )
    app.add_middleware(HttpMetrics, metrics=service.metrics)
    app.add_middleware(RequestIds)
    return app
