"""For operators: the served model, health, metrics, and what the cache holds, forgets or moves down."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from strata import __version__
from strata.config import parse_size
from strata.engine.api import TIERS, TierReport, WaitingReport
from strata.errors import CapacityError
from strata.serve.documented import NOT_NOW, TEXT
from strata.serve.errors import ApiError
from strata.serve.protocol import AttachBody, DemoteBody, ResizeBody
from strata.serve.service import Service

_MOVES_IN = {"device": ("load",), "host": ("backup", "prefetch"), "disk": ("spill",)}
_COSTS = ("prefill", "decode", "load", "backup", "spill", "prefetch")
_TOO_LARGE = 2**63
"""Bytes that no tier has."""
_SHOWN = 60
_MOVES_OUT = {"device": ("backup",), "host": ("load", "spill"), "disk": ("prefetch",)}


def cache_body(tiers: list[TierReport], stats: dict[str, float]) -> dict[str, Any]:
    """What `/cache` says: each tier's sizes in bytes, the prompt tokens it served and the bytes moved in and
    out."""

    def moved(names: tuple[str, ...]) -> int:
        return int(sum(stats.get(f"{name}_bytes", 0) for name in names))

    body = {}
    for tier in tiers:
        body[tier.name] = {
            "enabled": tier.enabled,
            "capacity_bytes": tier.capacity_bytes,
            "used_bytes": tier.used_bytes,
            "pinned_bytes": tier.pinned_bytes,
            "used_tokens": tier.used_tokens,
            "hit_tokens": int(stats.get(f"prompt_tokens_{tier.name}", 0)),
            "bytes_in": moved(_MOVES_IN.get(tier.name, ())),
            "bytes_out": moved(_MOVES_OUT.get(tier.name, ())),
            "detail": tier.detail,
            "off_reason": tier.off_reason,
        }
    return {"tiers": body, "computed_tokens": int(stats.get("prompt_tokens_computed", 0)), "stats": stats}


def scheduler_body(waiting: list[WaitingReport], stats: dict[str, float]) -> dict[str, Any]:
    """What `/scheduler` says: a sentence for each waiting request, in the order in which they would go, and counters.
    `deferred` to `taken_over` count once a decision and request; `deferrals` and `deferred_s` what has ended. `costs`
    is what decisions reckon with, and how far off it was lately."""
    names = {
        "running": "running",
        "held": "held",
        "deferred": "deferred_rounds",
        "set_aside": "set_aside_rounds",
        "aged": "aged_requests",
        "taken_over": "taken_over_requests",
        "early_loads": "early_loads",
        "deferrals": "deferrals",
        "preemptions": "preemptions",
    }
    counters: dict[str, float] = {name: int(stats.get(entry, 0)) for name, entry in names.items()}
    counters["deferred_s"] = stats.get("deferred_ns", 0) / 1e9
    return {
        "waiting": [asdict(each) for each in waiting],
        "counters": counters,
        "costs": {work: costs_of(work, stats) for work in _COSTS},
    }


def costs_of(work: str, stats: dict[str, float]) -> dict[str, float]:
    """What the cost model knows of one kind of step or transfer. Costs are seconds or bytes a second; errors are
    |predicted - observed| / observed over the latest 64 measurements. What is not known is left out."""
    prefix = f"cost_{work}_"
    return {name.removeprefix(prefix): value for name, value in stats.items() if name.startswith(prefix)}


def admin_router(service: Service) -> APIRouter:
    """The routes, bound to a service."""
    router = APIRouter()
    engine = service.engine

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "strata",
            "root": engine.model_name,
            "parent": None,
            "max_model_len": engine.max_context,
            "permission": [],
        }

    @router.get("/v1/models")
    @router.head("/v1/models", include_in_schema=False)
    async def models() -> dict[str, Any]:
        """The one model that is served, under each of its names."""
        return {"object": "list", "data": [model_card(name) for name in service.model_names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model by one of its names."""
        service.check_model(name)
        return model_card(name or service.model_name)

    @router.get("/health", responses=NOT_NOW)
    @router.head("/health", include_in_schema=False)
    @router.get("/ping", include_in_schema=False)
    @router.post("/ping", include_in_schema=False)
    async def health() -> Response:
        """200 while requests can be answered, 503 after that, with sentences for the operator."""
        state = await service.probe(engine.health)
        body = {
            "status": "ok" if state.ok else "dead",
            "ready": state.ready and not service.leaving.is_set(),
            "problems": list(state.problems),
        }
        return JSONResponse(body, 200 if state.ok else 503)

    @router.get("/load")
    async def load() -> dict[str, int]:
        """How many answers are under way or wait to be, for routers made for vLLM."""
        return {"server_load": len(service.streams)}

    @router.get("/livez", responses=NOT_NOW)
    @router.head("/livez", include_in_schema=False)
    async def livez() -> Response:
        """200 unless nothing but a restart helps: what a supervisor asks before it kills."""
        state = await service.probe(engine.health)
        return JSONResponse({"live": state.ok, "problems": list(state.problems)}, 200 if state.ok else 503)

    @router.get("/ready", responses=NOT_NOW)
    @router.head("/ready", include_in_schema=False)
    @router.get("/readyz", include_in_schema=False)
    @router.head("/readyz", include_in_schema=False)
    async def ready() -> Response:
        """200 while new requests are welcome: what a load balancer asks before it sends one."""
        state = await service.probe(service.readiness)
        return JSONResponse(asdict(state), 200 if state.ready else 503)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version that runs."""
        return {"version": __version__}

    @router.get("/metrics", response_class=Response, responses=TEXT)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(await service.call(service.metrics.render), media_type=CONTENT_TYPE_LATEST)

    @router.get("/cache")
    async def cache() -> dict[str, Any]:
        """What each tier holds and did."""
        return await service.call(lambda: cache_body(engine.tiers(), engine.stats()))

    @router.get("/scheduler")
    async def scheduler() -> dict[str, Any]:
        """Who waits and why, and what the scheduler did so far."""
        waiting, stats = await service.call(lambda: (engine.waiting(), engine.stats()))
        return scheduler_body(waiting, stats)

    @router.post("/cache/flush")
    async def flush() -> dict[str, Any]:
        """Forgets every page that no request uses, in all tiers."""
        async with service.admin_lock:
            dropped = await service.call(engine.flush)
            service.observer.recent.flushed()
            return {"dropped": dropped}

    @router.post("/cache/demote")
    async def demote(body: DemoteBody) -> dict[str, Any]:
        """Empties the given tiers downward."""
        unknown = [tier for tier in body.tiers if tier not in TIERS]
        if unknown:
            message = f"tiers names {unknown[0]!r}, which is no tier; tiers are {', '.join(TIERS)}"
            raise ApiError(400, message, "invalid_value", "tiers")
        async with service.admin_lock:
            return {"moved": await service.call(engine.demote, body.tiers)}

    @router.post("/cache/resize")
    async def resize(body: ResizeBody) -> dict[str, Any]:
        """Gives a tier another size while requests run."""
        size = _size("size", body.size)
        async with service.admin_lock:
            try:
                return await service.call(engine.resize, body.tier, size)
            except CapacityError as error:
                # It will not fit later either.
                raise ApiError(400, str(error), "too_large", "size") from error

    @router.post("/cache/disk/attach")
    async def attach(body: AttachBody) -> dict[str, Any]:
        """Opens a disk root while requests run."""
        path = _path(body.path) if body.path else None
        capacity = None if body.capacity is None else _size("capacity", body.capacity)
        async with service.admin_lock:
            await service.call(engine.attach_disk, path, capacity)
            return {"problems": list((await service.call(engine.health)).problems)}

    @router.post("/cache/disk/detach")
    async def detach() -> dict[str, Any]:
        """Closes the disk tier while requests run; what it holds stays there."""
        async with service.admin_lock:
            return {"detached": await service.call(engine.detach_disk)}

    return router


def _path(text: str) -> Path:
    try:
        named = b"\0" not in os.fsencode(text)
    except UnicodeError:
        named = False
    if not named:
        raise ApiError(400, f"path {text[:_SHOWN]!r} names no folder; send another", "invalid_value", "path")
    return Path(text)


def _size(field: str, value: int | str) -> int:
    try:
        size = value if isinstance(value, int) else parse_size(value)
    except (ValueError, OverflowError):
        size = -1
    if not 0 <= size < _TOO_LARGE:
        shown = repr(value)[:_SHOWN]
        message = f"{field} {shown} is no size: send bytes, or text such as 8GiB"
        raise ApiError(400, message, "invalid_value", field)
    return size
