"""Sixty-four clients on a device pool too small for two of their requests: every token is the cache-off one."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace

import pytest
from engine_harness import MakeEngine, Sizes
from pressure import Load, assert_clean, device_pages, run_clients

from strata.engine import Engine, ServedModel
from strata.errors import RequestError

PRESSURE = (
    "preemptions",
    "device_evicted_pages",
    "host_evicted_pages",
    "prompt_tokens_device",
    "prompt_tokens_host",
    "prompt_tokens_disk",
    "spill_pages",
)


@pytest.mark.parametrize("seed", [1, 2])
def test_sixty_four_streams(make_engine: MakeEngine, served: ServedModel, seed: int) -> None:
    load = Load(seed, documents=16, document_tokens=(16, 60), answer_tokens=(1, 40), pause_s=1.0)
    sizes = Sizes(4, device_pages(load, 4, 1.9), 200, 8 << 20)
    engine = make_engine(sizes=sizes)
    # Who meets whom in the pool depends on who is quicker: where all pass each other by, others are sent.
    for again in range(6):
        outcome = run_clients(engine, served.model, replace(load, seed=seed + 10 * again))
        assert_clean(engine, outcome)
        assert outcome.finished > 40 and outcome.aborted > 5
        stats = engine.stats()
        missing = [counter for counter in PRESSURE if not stats[counter]]
        if not missing:
            return
    raise AssertionError(f"the pressure that this test is about was missing: {missing} are 0")


@dataclass(frozen=True)
class Shape:
    """An engine and its clients; what is not named is the usual."""

    name: str
    page: int = 4
    device_share: float = 1.9
    host: int = 120
    disk: int = 2 << 20
    clients: int = 24
    settings: dict[str, object] = field(default_factory=dict)


SHAPES = [
    Shape("page 1", page=1, host=400),
    Shape("page 16", page=16, host=30),
    Shape("one at a time", settings={"max_running": 1}),
    Shape("one plan", settings={"outstanding_plans": 1}),
    Shape("selective", settings={"write_policy": "selective"}),
    Shape("no host", host=0),
    Shape("no disk", disk=0),
    Shape("host of three pages", host=3),
    Shape("disk of few pages", disk=160 << 10),
    Shape("small chunks", settings={"batch_tokens": 7}),
    Shape("slow link", settings={"copy_bandwidth": 3_000_000}),
    Shape("no patience for the disk", settings={"prefetch_policy": "timeout", "prefetch_timeout_s": 0.0}),
    Shape("exactly one request", device_share=1.0),
    Shape("room for five", device_share=5.0),
    *(
        Shape(
            f"{policy}, room for three", device_share=3.0, settings={"policy": policy, "deferral_tokens": 5}
        )
        for policy in ("fcfs", "lpm", "static", "adaptive")
    ),
    Shape(
        "adaptive, slow link, short gaps",
        device_share=5.0,
        settings={"copy_bandwidth": 3_000_000, "deferral_tokens": 5, "max_decode_stall_ms": 5},
    ),
    Shape(
        "static without its parts",
        settings={"policy": "static", "scheduler_off": "defer,balance,bundles,bubbles"},
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes(make_engine: MakeEngine, served: ServedModel, shape: Shape) -> None:
    load = Load(7, clients=shape.clients, documents=4, turns=2, salts=("", "tenant"))
    device = device_pages(load, shape.page, shape.device_share)
    engine = make_engine(sizes=Sizes(shape.page, device, shape.host, shape.disk), **shape.settings)
    assert_clean(engine, run_clients(engine, served.model, load))


def meddle(engine: Engine, seed: int, stop: threading.Event, problems: list[str]) -> None:
    """Flushes, demotes and checks at random until told to stop."""
    generator = random.Random(seed)
    deeds = [
        engine.check,
        lambda: engine.flush(generator.choice([0.0, 1.0])),
        lambda: engine.demote(["device"], generator.choice([0.0, 0.05, 1.0])),
        lambda: engine.demote(["device", "host"], generator.choice([0.0, 0.05, 1.0])),
        engine.tiers,
    ]
    while not stop.wait(generator.random() * 0.1):
        try:
            generator.choice(deeds)()
        except RequestError:
            continue  # the tier that the demotion named is off
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shall show it
            problems.append(f"{type(error).__name__}: {error}")
            return


@pytest.mark.parametrize("seed", [11, 12])
def test_maintenance_meanwhile(make_engine: MakeEngine, served: ServedModel, seed: int) -> None:
    load = Load(seed, clients=32, documents=4, turns=2)
    engine = make_engine(sizes=Sizes(4, device_pages(load, 4, 2.5), 150, 1 << 20))
    stop, problems = threading.Event(), list[str]()
    meddler = threading.Thread(target=meddle, args=(engine, seed, stop, problems), daemon=True)
    meddler.start()
    outcome = run_clients(engine, served.model, load)
    stop.set()
    meddler.join(30.0)
    assert not meddler.is_alive() and not problems, problems
    assert_clean(engine, outcome)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 200))
def test_any_shape(make_engine: MakeEngine, served: ServedModel, seed: int) -> None:
    pick = random.Random(seed)
    page = pick.choice([1, 4, 4, 16])
    load = Load(
        seed,
        clients=pick.choice([8, 32, 64]),
        documents=pick.choice([3, 6, 20]),
        abort_share=pick.choice([0.0, 0.25, 0.6]),
        turns=pick.choice([1, 3]),
        salts=pick.choice([("",), ("", "tenant")]),
    )
    sizes = Sizes(
        page,
        device_pages(load, page, pick.choice([1.0, 1.3, 1.9, 4.0])),
        pick.choice([0, 5, 60, 200, 800]),
        pick.choice([0, 160 << 10, 1 << 20, 4 << 20]),
    )
    engine = make_engine(
        sizes=sizes,
        max_running=pick.choice([1, 3, 8, 64]),
        outstanding_plans=pick.choice([1, 2]),
        write_policy=pick.choice(["through", "selective"]),
        prefetch_policy=pick.choice(["adaptive", "best_effort", "wait", "timeout"]),
        load_policy=pick.choice(["quicker", "always"]),
        batch_tokens=pick.choice([7, 32, 512]),
        copy_bandwidth=pick.choice([0, 3_000_000]),
        prefetch_timeout_s=pick.choice([0.0, 0.002, 30.0]),
    )
    assert_clean(engine, run_clients(engine, served.model, load))
