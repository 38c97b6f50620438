"""The server under load: what it is, and, if it is Strata, how its tiers are put where a run wants them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from strata.bench.load.client import OpenAIClient
from strata.errors import ConfigError, StorageError, StrataError

WARM_TIERS: dict[str, tuple[str, ...]] = {"device": (), "host": ("device",), "disk": ("device", "host")}
"""What a warm start leaves warm -> the tiers that are then emptied downward."""
_SETTLE_TIMEOUT_S = 120.0
_POLL_S = 0.02
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class ServerFacts:
    """What is known of a server. `tiers` gives capacities in bytes; None if it is not Strata."""

    model: str
    max_tokens: int | None
    owner: str | None
    tiers: dict[str, int] | None

    @property
    def is_strata(self) -> bool:
        """Whether the tiers can be looked at and emptied."""
        return self.tiers is not None

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "model": self.model,
            "max_model_len": self.max_tokens,
            "owned_by": self.owner,
            "is_strata": self.is_strata,
            "tier_capacity_bytes": self.tiers,
        }


async def look_at(http: httpx.AsyncClient, model: str | None) -> ServerFacts:
    """Asks a server what it serves. Raises ConfigError if it is none or serves another model than `model`."""
    listed = await _json(http, "GET", "/v1/models")
    cards = {str(card["id"]): card for card in listed.get("data", ())}
    if not cards:
        raise ConfigError(f"--url {http.base_url} lists no model at /v1/models; start it with one")
    name = model or next(iter(cards))
    # Strata has one model, and lists it under each of its names.
    if model is None and len(cards) > 1 and cards[name].get("owned_by") != "strata":
        raise ConfigError(
            f"--url {http.base_url} serves several models; give --model, one of {', '.join(cards)}"
        )
    card = cards.get(name, {})
    length = card.get("max_model_len")
    tiers = await _tiers(http)
    return ServerFacts(name, int(length) if length else None, card.get("owned_by"), tiers)


async def _tiers(http: httpx.AsyncClient) -> dict[str, int] | None:
    try:
        response = await http.get("/cache")
        found = response.json()["tiers"] if response.status_code == httpx.codes.OK else None
        return None if found is None else {name: int(tier["capacity_bytes"]) for name, tier in found.items()}
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        # Another server may do anything with a path that it does not know.
        return None


class StrataAdmin:
    """Strata's own routes. Raises StrataError with the server's words."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def stats(self) -> dict[str, float]:
        """The engine's counters and gauges."""
        found: dict[str, float] = (await _json(self._http, "GET", "/cache"))["stats"]
        return found

    async def used_tokens(self) -> dict[str, int]:
        """Tokens that each tier holds."""
        tiers = (await _json(self._http, "GET", "/cache"))["tiers"]
        return {name: int(tier["used_tokens"]) for name, tier in tiers.items()}

    async def flush(self) -> None:
        """Forgets everything, once nothing runs."""
        await self.settle()
        await _json(self._http, "POST", "/cache/flush")

    async def demote(self, tiers: Sequence[str]) -> None:
        """Empties the tiers downward, once nothing runs."""
        await self.settle()
        await _json(self._http, "POST", "/cache/demote", {"tiers": list(tiers)})

    async def settle(self) -> None:
        """Returns once nothing runs, waits or moves, twice in a row. Raises StorageError after two minutes."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        idle = 0
        while idle < 2:
            stats = await self.stats()
            idle = (
                0 if any(stats[name] for name in ("running", "waiting", "transfers_in_flight")) else idle + 1
            )
            if time.monotonic() > deadline:
                raise StorageError(
                    f"the server did not come to rest within {_SETTLE_TIMEOUT_S:g} s; its log says why"
                )
            await asyncio.sleep(_POLL_S)


async def warm(
    client: OpenAIClient, admin: StrataAdmin | None, endpoint: str, texts: Sequence[str], tier: str
) -> dict[str, int]:
    """Sends every text once, then empties what lies above `tier`. Returns the tokens that each tier holds then; nothing
    for a server that does not tell. Raises StrataError if a text is not answered or `tier` holds nothing.
    """
    for text in texts:
        reply = await client.ask(endpoint, [{"role": "user", "content": text}], 1)
        if reply.error is not None:
            raise StrataError(f"--warm {tier}: the server did not answer ({reply.error})")
    if admin is None:
        return {}
    if WARM_TIERS[tier]:
        await admin.demote(WARM_TIERS[tier])
    await admin.settle()
    held = await admin.used_tokens()
    above = sum(held.get(name, 0) for name in WARM_TIERS[tier])
    if not held.get(tier) or above:
        raise StorageError(
            f"--warm {tier} was to leave the documents in the {tier} tier, and the tiers hold {held} tokens; the sizes "
            "of the tiers (--host-memory, --disk-capacity) and the server's log say why"
        )
    return held


def check_warm(tier: str | None, facts: ServerFacts) -> None:
    """Raises ConfigError if the server cannot be put into that state."""
    if tier is None or not WARM_TIERS[tier]:
        return
    if facts.tiers is None:
        raise ConfigError(
            f"--warm {tier} needs Strata's /cache routes, and this server has none; give --warm device, which only "
            "sends every document once, or leave it out"
        )
    if not facts.tiers.get(tier):
        raise ConfigError(f"--warm {tier}: the server has no {tier} tier; start it with one, or warm another")


async def characters_per_token(client: OpenAIClient, endpoint: str, samples: Sequence[str]) -> float:
    """How many characters of such texts the server makes a token of. Raises StrataError if it does not tell."""
    tokens = [await client.count_tokens(endpoint, sample) for sample in samples]
    return sum(map(len, samples)) / sum(tokens)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What changed in the server's numbers during a run."""
    return {name: after[name] - value for name, value in before.items() if after.get(name, value) != value}


async def _json(http: httpx.AsyncClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
    try:
        response = await http.request(method, path, json=body, timeout=_TIMEOUT_S)
        if response.status_code != httpx.codes.OK:
            raise StrataError(
                f"the server answered {method} {path} with {response.status_code}: {response.text[:300]}"
            )
        found: dict[str, Any] = response.json()
        return found
    except httpx.HTTPError as error:
        raise StrataError(
            f"--url {http.base_url}: {method} {path} failed ({type(error).__name__}: {error}); is a server "
            "running there?"
        ) from error
    except ValueError as error:
        raise StrataError(f"--url {http.base_url} answered {method} {path} with no JSON: {error}") from error
