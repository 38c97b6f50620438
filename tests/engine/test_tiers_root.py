"""One writer a root, and files that change beneath a living engine: a tier less, never a wrong answer."""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path

import pytest
from engine_harness import MakeEngine, Sizes, ask, assert_exact, eventually, wait_idle
from pressure import Load, assert_clean, device_pages, run_clients

from strata.engine import Engine, ServedModel

PROMPT = [(7 + 3 * place) % 97 for place in range(41)]
TAKE_OVER_S = 60.0


def test_the_second_engine_takes_the_root_over(make_engine: MakeEngine, served: ServedModel) -> None:
    first, second = make_engine(), make_engine()
    assert (first.stats()["disk_up"], second.stats()["disk_up"]) == (1, 0)
    for engine in (first, second):
        assert_exact(served.model, PROMPT, ask(engine, PROMPT))
    report = second.tiers()[2]
    assert not report.enabled and "in use by" in (report.off_reason or "")
    assert any("in use by" in problem and "tried again" in problem for problem in second.health().problems)
    attempts = second.stats()["disk_open_attempts"]
    assert eventually(lambda: second.stats()["disk_open_attempts"] > attempts + 2)
    assert any("tried again every 2 s" in problem for problem in second.health().problems)
    assert second.stats()["disk_up"] == 0
    wait_idle(first)
    first.shutdown(drain_s=1.0, demote_s=5.0)
    assert eventually(lambda: second.stats()["disk_up"] == 1, TAKE_OVER_S)
    assert second.health().problems == () and second.tiers()[2].enabled
    # What the first one wrote is found, and what the second one holds goes there.
    assert eventually(lambda: second.stats()["disk_resident_pages"] >= 10)
    wait_idle(second)
    second.demote(["device", "host"])
    answer = ask(second, PROMPT)
    assert_exact(served.model, PROMPT, answer)
    assert answer.sources == (0, 0, 40, 1)


def test_a_root_that_is_deleted_is_made_anew_and_found_by_the_next_start(
    make_engine: MakeEngine, served: ServedModel, tmp_path: Path
) -> None:
    engine = make_engine()
    assert_exact(served.model, PROMPT, ask(engine, PROMPT))
    wait_idle(engine)
    attempts = engine.stats()["disk_open_attempts"]
    shutil.rmtree(tmp_path / "kv")
    told = f"opened again: disk root {tmp_path / 'kv'} was deleted"
    assert eventually(lambda: told in engine.tiers()[2].detail, TAKE_OVER_S)
    assert engine.stats()["disk_open_attempts"] > attempts
    assert engine.stats()["disk_up"] == 1
    assert_exact(served.model, PROMPT, ask(engine, PROMPT))
    assert engine.health().ok and engine.health().problems == ()
    kept = engine.shutdown(drain_s=1.0, demote_s=30.0)
    assert kept["disk_resident_pages"] >= 10
    again = make_engine()
    assert again._runtime.recovered == (kept["disk_resident_pages"], 0)
    assert ask(again, PROMPT).sources == (0, 0, 40, 1)


class Vandal:
    """Deletes, truncates and overwrites segment files at random until told to stop."""

    def __init__(self, root: Path, deeds: tuple[str, ...], seed: int) -> None:
        self.count = 0
        self._root, self._deeds, self._generator = root, deeds, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vandal", daemon=True)

    def __enter__(self) -> Vandal:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(30.0)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            paths = sorted(self._root.glob("*/segment-*.k[vh]"))
            if not paths:
                continue
            path, deed = self._generator.choice(paths), self._generator.choice(self._deeds)
            size = path.stat().st_size
            if deed == "delete":
                path.unlink()
            elif deed == "truncate":
                os.truncate(path, self._generator.randrange(size + 1))
            else:
                with path.open("r+b") as file:
                    file.seek(self._generator.randrange(size + 1))
                    file.write(self._generator.randbytes(self._generator.randint(1, 20000)))
            self.count += 1


@pytest.mark.parametrize(
    "deeds",
    [("delete",), ("truncate",), ("overwrite",), ("delete", "truncate", "overwrite")],
    ids=lambda deeds: " and ".join(deeds),
)
@pytest.mark.parametrize("host", [60, 0], ids=["three tiers", "staging"])
def test_files_that_change_under_load(
    make_engine: MakeEngine, served: ServedModel, tmp_path: Path, deeds: tuple[str, ...], host: int
) -> None:
    load = Load(41, clients=24, documents=8, document_tokens=(30, 80), turns=3, pause_s=0.3)
    engine: Engine = make_engine(
        sizes=Sizes(4, device_pages(load, 4, 1.5), host, 2 << 20),
        prefetch_policy="wait",
        load_policy="always",
    )
    with Vandal(tmp_path / "kv", deeds, 1) as vandal:
        outcome = run_clients(engine, served.model, load)
    assert_clean(engine, outcome)
    assert vandal.count > 10
    if deeds != ("delete",):
        stats = engine.stats()
        # Files that are deleted live on for who has them open; the others must have been noticed.
        assert stats["corrupt_records"] + stats["prefetch_failed"] + stats["spill_failed"] > 0
    # The next engine makes of the root what it can.
    engine.shutdown(drain_s=1.0, demote_s=5.0)
    again = make_engine(sizes=Sizes(4, device_pages(load, 4, 1.5), host, 2 << 20))
    assert_exact(served.model, PROMPT, ask(again, PROMPT))
    wait_idle(again)
    assert again.health().ok
