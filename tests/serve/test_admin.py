"""Models, health, metrics, the cache's state and the two orders that change it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import RunningServer


def samples_of(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_models(served: RunningServer) -> None:
    cards = list(served.openai.models.list())
    assert [card.id for card in cards] == ["fake-model", "default"]
    assert served.openai.models.retrieve("default").id == "default"
    found = served.http.get("/v1/models").json()["data"]
    assert [card["max_model_len"] for card in found] == [4096, 4096]
    assert [(card["root"], card["parent"], card["permission"]) for card in found] == [
        ("fake-model", None, [])
    ] * 2
    head = served.http.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    assert served.http.get("/v1/models/gpt-9").status_code == 404


def test_a_served_name_replaces_the_models_own(serve: Callable[..., RunningServer]) -> None:
    served = serve(served_model_name="org/tiny")
    assert served.openai.models.retrieve("org/tiny").id == "org/tiny"
    assert served.openai.completions.create(model="org/tiny", prompt="x").model == "org/tiny"
    assert served.http.post("/v1/completions", json={"prompt": "x", "model": "fake-model"}).status_code == 404


def test_a_model_may_have_several_names(serve: Callable[..., RunningServer]) -> None:
    served = serve(served_model_name="org/tiny, tiny,default")
    assert [card.id for card in served.openai.models.list()] == ["org/tiny", "tiny", "default"]
    for name in ("org/tiny", "tiny", "default"):
        assert served.openai.completions.create(model=name, prompt="x").model == "org/tiny"
        assert served.openai.models.retrieve(name).id == name
    answer = served.http.post("/v1/completions", json={"prompt": "x", "model": "fake-model"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith("use 'org/tiny' or 'tiny' or 'default'")
    only = serve(served_model_name="default")
    assert [card.id for card in only.openai.models.list()] == ["default"]


def test_health(served: RunningServer) -> None:
    answer = served.http.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "ready": True, "problems": []}


def test_metrics_are_readable_and_agree_with_the_engine(serve: Callable[..., RunningServer]) -> None:
    served = serve()
    served.http.post("/v1/completions", json={"prompt": "x"}).raise_for_status()
    served.http.get("/no/such/path")
    samples = samples_of(served.http.get("/metrics").text)

    def value(name: str, **labels: str) -> float:
        return samples[name, frozenset(labels.items())]

    assert value("strata_prompt_tokens_total", source="disk") == 3984
    assert value("strata_prompt_tokens_total", source="host") == 0
    assert value("strata_transfer_bytes_total", move="load") == 1000
    assert value("strata_running") == 2
    assert value("strata_device_pinned_pages") == 3
    assert value("strata_preemptions_total") == 7
    assert value("strata_cost_load_error_median") == 0.07
    assert value("strata_cost_load_error_p90") == 0.31
    assert value("strata_hit_age_seconds_bucket", le="10.0") == 5
    assert value("strata_hit_age_seconds_bucket", le="+Inf") == 6
    assert value("strata_hit_age_seconds_sum") == 700
    assert value("strata_tier_used_bytes", tier="disk") == 1 << 29
    assert value("strata_time_to_first_token_seconds_count") == 1
    assert value("strata_time_to_first_token_seconds_sum") == 0.25
    assert value("strata_requests_finished_total", reason="stop") == 1
    assert value("strata_http_requests_total", route="/v1/completions", status="200") == 1
    assert value("strata_http_requests_total", route="other", status="404") == 1


def test_scheduler_says_why_each_request_waits(served: RunningServer) -> None:
    body = served.http.get("/scheduler").json()
    (waiting,) = body["waiting"]
    assert waiting["request_id"] == 7 and waiting["waited_s"] == 1.5
    assert waiting["why"].startswith("deferred: request 6 computes 290")
    assert body["counters"]["deferred_s"] == 1.5 and body["counters"]["set_aside"] == 4


def test_scheduler_says_what_it_reckons_with_and_how_far_off_it_is(served: RunningServer) -> None:
    costs = served.http.get("/scheduler").json()["costs"]
    assert list(costs) == ["prefill", "decode", "load", "backup", "spill", "prefetch"]
    assert costs["load"] == {
        "bytes_per_s": 2.5e9,
        "measurements": 12,
        "error_median": 0.07,
        "error_p90": 0.31,
    }
    assert costs["decode"] == {"error_p90": 0.2} and costs["backup"] == {}


def test_cache(served: RunningServer) -> None:
    body = served.http.get("/cache").json()
    assert list(body["tiers"]) == ["device", "host", "disk"]
    disk = body["tiers"]["disk"]
    assert disk == {
        "enabled": True,
        "capacity_bytes": 10 << 30,
        "used_bytes": 1 << 29,
        "pinned_bytes": 4096,
        "used_tokens": 12000,
        "hit_tokens": 3984,
        "bytes_in": 500,
        "bytes_out": 300,
        "detail": "2 threads",
        "off_reason": None,
    }
    assert body["tiers"]["host"]["off_reason"] == "--host-memory is 0"
    assert (body["tiers"]["host"]["bytes_in"], body["tiers"]["host"]["bytes_out"]) == (300, 1500)
    assert body["computed_tokens"] == 28


@pytest.mark.parametrize("tiers", [["device"], ["device", "host"]])
def test_flush_and_demote(served: RunningServer, tiers: list[str]) -> None:
    dropped = served.http.post("/cache/flush").json()["dropped"]
    assert (dropped["device_dropped"], dropped["host_kept"], dropped["disk_dropped"]) == (3, 2, 5)
    assert served.http.post("/cache/demote", json={"tiers": tiers}).json() == {"moved": {"device_moved": 250}}
    assert served.engine.calls == [("flush",), ("demote", *tiers)]


def test_tiers_change_at_run_time(served: RunningServer) -> None:
    resized = served.http.post("/cache/resize", json={"tier": "host", "size": "2GiB"})
    assert resized.json() == {"bytes": 2 << 30, "timed_out": 0}
    assert served.http.post("/cache/disk/detach").json() == {"detached": True}
    attached = served.http.post("/cache/disk/attach", json={"path": "elsewhere", "capacity": "1MiB"})
    assert attached.json() == {"problems": []}
    assert served.http.post("/cache/disk/attach", json={}).status_code == 200
    assert served.engine.calls == [
        ("resize", "host", 2 << 30),
        ("detach_disk",),
        ("attach_disk", Path("elsewhere"), 1 << 20),
        ("attach_disk", None, None),
    ]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"tier": "host", "size": "8 gallons"}, "8 gallons"),
        ({"tier": "tape", "size": 4096}, "tape"),
        ({"tier": "host", "size": 2**64}, "no size"),
        ({"tier": "host", "size": -1}, "no size"),
        ({"tier": "host", "size": "9" * 400}, "no size"),
        ({"tier": "host", "size": 1 << 60}, "does not fit"),
    ],
)
def test_resizing_to_nonsense_is_refused(served: RunningServer, body: dict[str, object], word: str) -> None:
    answer = served.http.post("/cache/resize", json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"capacity": -1}, "no size"),
        ({"capacity": 2**64}, "no size"),
        ({"path": "a\0b"}, "names no folder"),
        ({"path": "attached"}, "is attached already"),
    ],
)
def test_attaching_nonsense_is_refused(served: RunningServer, body: dict[str, object], word: str) -> None:
    answer = served.http.post("/cache/disk/attach", json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_no_page_runs_scripts_of_another_site(served: RunningServer, path: str) -> None:
    assert served.http.get(path).status_code == 404


def test_the_openapi_document_is_complete(served: RunningServer) -> None:
    paths = served.http.get("/openapi.json").json()["paths"]
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/health",
        "/metrics",
        "/cache",
        "/scheduler",
    } <= set(paths)
    assert "requestBody" in paths["/v1/completions"]["post"]
