"""Tenants do not share pages: by their own salts, and by their keys. Counted in hits, on a real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_harness import Sizes, engine_of, wait_idle
from running_server import RunningServer

from strata.engine import Engine

PROMPT = list(range(40))
WHOLE = 36
"""The cached tokens of a prompt that was asked before: its pages of 4, less the one that the next token needs."""

Start = Callable[..., RunningServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers around a tiny model with all three tiers."""
    begun: list[tuple[RunningServer, Engine]] = []

    def begin(**settings: object) -> RunningServer:
        engine = engine_of(tmp_path, Sizes(page=4))
        begun.append((RunningServer(settings, engine), engine))
        return begun[-1][0]

    yield begin
    for server, engine in begun:
        server.stop()
        engine.shutdown(0.0, 0.0)


def cached(served: RunningServer, key: str = "", **body: object) -> int:
    """Asks; returns how many of the prompt's tokens came from a tier."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **body}
    answer = served.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    sources = usage["strata"]
    assert sum(sources[tier] for tier in ("device", "host", "disk", "computed")) == usage["prompt_tokens"]
    wait_idle(served.engine)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_salts_part_tenants_in_every_tier(start: Start) -> None:
    served = start()
    assert cached(served, cache_salt="a") == 0
    for number, tiers in enumerate(([], ["device"], ["device", "host"])):
        if tiers:
            served.http.post("/cache/demote", json={"tiers": tiers}).raise_for_status()
        for other in ("b", "A", "a ", "a\0", "aa"):
            assert cached(served, cache_salt=f"{other}{number}") == 0
        assert cached(served, cache_salt="a") == WHOLE
    assert cached(served) == 0, "no salt is a tenant of its own"
    assert cached(served, cache_salt=None) == cached(served, cache_salt="") == WHOLE


@pytest.mark.parametrize("per_key", [False, True])
def test_keys_part_tenants_only_if_they_shall(start: Start, per_key: bool) -> None:
    served = start(api_key="one,two", admin_api_key="root", salt_per_key=per_key)
    assert cached(served, "one") == 0
    assert cached(served, "one") == WHOLE
    assert cached(served, "two") == (0 if per_key else WHOLE)
    assert cached(served, "two") == WHOLE
    assert cached(served, "one", cache_salt="a") == 0, "a key's own salts part as before"
    assert cached(served, "one", cache_salt="a") == WHOLE
    assert cached(served, "two", cache_salt="a") == (0 if per_key else WHOLE)


def test_a_key_finds_its_pages_after_a_restart(start: Start) -> None:
    first = start(api_key="one,two", admin_api_key="root", salt_per_key=True)
    assert cached(first, "one") == 0
    first.stop()
    first.engine.shutdown(1.0, 10.0)
    second = start(api_key="two,three,one", admin_api_key="root", salt_per_key=True)
    assert cached(second, "two") == 0
    assert cached(second, "one") == WHOLE
