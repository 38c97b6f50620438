"""Every shape of hierarchy under every policy, and tiers that change while clients come and go.

Whatever the shape: tokens are those with the cache off, the books agree, nothing stays pinned when all is over, and
what the tiers hold is found again, in each of them.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_harness import HOST_ALIGNMENT, MakeEngine, Sizes
from pressure import Load, assert_clean, device_pages, run_clients
from tier_walk import MAX_RUNNING, enabled, walk

from strata.engine import Engine, ServedModel
from strata.errors import ConfigError, RequestError

WRITES = ("back", "through", "selective")
PREFETCHES = ("adaptive", "best_effort", "wait", "timeout")
PAGE = 4


@dataclass(frozen=True)
class Shape:
    """Pages of the host tier and bytes of the disk; the device holds twice the longest request."""

    name: str
    host: int
    disk: int

    def combinations(self) -> list[tuple[str, str, str]]:
        """Policies of both writes and of prefetch: every pair of any two of them, as far as the shape has use for
        them."""
        every = [(WRITES[index % 3], WRITES[index // 4], PREFETCHES[index % 4]) for index in range(12)]
        if not self.disk:
            return [(write, "through", "adaptive") for write in WRITES] if self.host else every[:1]
        return every


SHAPES = [
    Shape("host smaller than device", host=24, disk=2 << 20),
    Shape("disk smaller than host", host=200, disk=384 << 10),
    Shape("staging", host=0, disk=2 << 20),
    Shape("no disk", host=60, disk=0),
    Shape("device alone", host=0, disk=0),
]
COMBINATIONS = [(shape, *policies) for shape in SHAPES for policies in shape.combinations()]


def start(
    make_engine: MakeEngine, load: Load, shape: Shape, write: str, disk_write: str, prefetch: str
) -> Engine:
    return make_engine(
        sizes=Sizes(PAGE, device_pages(load, PAGE, 1.9), shape.host, shape.disk),
        write_policy=write,
        disk_write_policy=disk_write,
        prefetch_policy=prefetch,
        load_policy="always",
        max_running=MAX_RUNNING,
    )


@pytest.mark.parametrize(
    ("shape", "write", "disk_write", "prefetch"), COMBINATIONS, ids=lambda part: getattr(part, "name", part)
)
def test_every_shape_under_every_policy(
    make_engine: MakeEngine, served: ServedModel, shape: Shape, write: str, disk_write: str, prefetch: str
) -> None:
    load = Load(5, clients=12, documents=3, document_tokens=(20, 80), turns=2, abort_share=0.3)
    engine = start(make_engine, load, shape, write, disk_write, prefetch)
    assert_clean(engine, run_clients(engine, served.model, load))
    engine.flush()
    walk(engine, served.model, 1)
    stats = engine.stats()
    for tier in enabled(engine):
        held_back = stats["recomputed_tokens_disk"] if prefetch == "adaptive" else 0
        assert stats[f"prompt_tokens_{tier}"] + held_back > 0, f"no hit from {tier}"


class Meddler:
    """Resizes tiers, takes the disk away and brings it back, at random, until told to stop."""

    def __init__(self, engine: Engine, seed: int, disk: int, least_device: int) -> None:
        self.engine = engine
        self.problems: list[str] = []
        self.done: dict[str, int] = {}
        self._generator = random.Random(seed)
        self._disk = disk
        self._least_device = least_device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meddler", daemon=True)

    def __enter__(self) -> Meddler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(60.0)
        assert not self._thread.is_alive() and not self.problems, self.problems

    def _run(self) -> None:
        deeds: dict[str, Callable[[], object]] = {
            "device": self._resize_device,
            "host": self._resize_host,
            "disk": self._resize_disk,
            "plug": self._plug,
            "check": self.engine.check,
        }
        while not self._stop.wait(self._generator.random() * 0.05):
            name = self._generator.choice(list(deeds))
            try:
                deeds[name]()
            except (ConfigError, RequestError):
                continue  # the disk is not there to be resized, or is there already
            except Exception as error:  # noqa: BLE001 - whatever it is, the test shall show it
                if "still being recovered" in str(error):
                    continue  # a disk that was just attached takes another size when it has been read
                self.problems.append(f"{name}: {type(error).__name__}: {error}")
                return
            self.done[name] = self.done.get(name, 0) + 1

    def _limit(self) -> float:
        return self._generator.choice([0.0, 0.05, 1.0])

    def _resize_device(self) -> None:
        page = int(self.engine.stats()["page_bytes"])
        most = self.engine.config.cache.device_memory // page
        self.engine.resize("device", self._generator.randint(self._least_device, most) * page, self._limit())

    def _resize_host(self) -> None:
        pages = self._generator.choice([0, 2, 30, 200])
        self.engine.resize("host", pages * HOST_ALIGNMENT, self._limit())

    def _resize_disk(self) -> None:
        self.engine.resize("disk", self._generator.choice([384 << 10, 1 << 20, 3 << 20]), self._limit())

    def _plug(self) -> None:
        if not self.engine.detach_disk(self._limit()):
            return
        if self._generator.random() < 0.8:
            self.engine.attach_disk(None, self._disk or 1 << 20)


def meddled(
    make_engine: MakeEngine,
    served: ServedModel,
    load: Load,
    policies: tuple[Shape, str, str, str],
    meddlers: int = 1,
) -> dict[str, int]:
    """Clients over tiers that change beneath them; then the tiers as they were serve as they should. Returns how
    often what was changed."""
    shape = policies[0]
    engine = start(make_engine, load, *policies)
    # Less than the longest request would have to be refused.
    changers = [
        Meddler(engine, load.seed + each, shape.disk, device_pages(load, PAGE, 1.0) + 1)
        for each in range(meddlers)
    ]
    for changer in changers:
        changer.__enter__()
    outcome = run_clients(engine, served.model, load)
    for changer in changers:
        changer.__exit__()
    assert_clean(engine, outcome)
    engine.resize("device", engine.config.cache.device_memory)
    engine.resize("host", shape.host * HOST_ALIGNMENT)
    assert engine.detach_disk()
    if shape.disk:
        engine.attach_disk(None, shape.disk)
    engine.flush()
    walk(engine, served.model, load.seed)
    assert len(enabled(engine)) == 1 + (shape.host > 0) + (shape.disk > 0)
    return {name: sum(changer.done.get(name, 0) for changer in changers) for name in changers[0].done}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_tiers_change_while_clients_run(make_engine: MakeEngine, served: ServedModel, shape: Shape) -> None:
    load = Load(21, clients=24, documents=4, document_tokens=(20, 80), turns=3, pause_s=0.3)
    done = meddled(make_engine, served, load, (shape, "through", "through", "wait"))
    assert {"device", "host", "plug"} <= done.keys(), done


def test_two_at_once_change_the_tiers(make_engine: MakeEngine, served: ServedModel) -> None:
    load = Load(22, clients=24, documents=4, document_tokens=(20, 80), turns=3, pause_s=0.3)
    done = meddled(make_engine, served, load, (SHAPES[0], "back", "back", "adaptive"), meddlers=3)
    assert {"device", "host", "plug"} <= done.keys(), done


ALL_POLICIES = list(itertools.product(SHAPES, WRITES, WRITES, PREFETCHES))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1000 + 2 * len(ALL_POLICIES)))
def test_any_policy_over_tiers_that_change(make_engine: MakeEngine, served: ServedModel, seed: int) -> None:
    load = Load(
        seed, clients=32, documents=4, document_tokens=(20, 120), turns=3, pause_s=0.3, salts=("", "tenant")
    )
    meddled(make_engine, served, load, ALL_POLICIES[seed % len(ALL_POLICIES)])


def test_a_disk_that_comes_later_and_goes(
    make_engine: MakeEngine, served: ServedModel, tmp_path: Path
) -> None:
    """What an engine without a disk holds goes to the one that is attached; what that one holds comes back with it."""
    shape = Shape("later", host=60, disk=0)
    engine = start(make_engine, Load(1), shape, "through", "through", "wait")
    walk(engine, served.model, 3)
    assert enabled(engine) == ["device", "host"]
    engine.attach_disk(tmp_path / "late", 1 << 20)
    with pytest.raises(ConfigError, match="attached already"):
        engine.attach_disk(tmp_path / "late", 1 << 20)
    walk(engine, served.model, 4)
    resident = engine.stats()["disk_resident_pages"]
    assert resident > 0 and engine.stats()["disk_up"] == 1
    assert engine.detach_disk()
    stats = engine.stats()
    assert (stats["disk_resident_pages"], stats["disk_up"]) == (0, 0)
    assert engine.health().problems == (), "a disk that somebody took away is no problem"
    walk(engine, served.model, 5)
    engine.attach_disk(tmp_path / "late", 1 << 20)
    walk(engine, served.model, 6)
    assert engine.stats()["disk_resident_pages"] >= resident
