"""`python fake_server_process.py FLAGS`: the real program around a fake engine."""

from __future__ import annotations

import os
import sys
import time


class TorchWatch:
    """Says under which OpenMP policy torch is first looked for."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            print(f"torch is imported under {os.environ.get('OMP_WAIT_POLICY')}", flush=True)


sys.meta_path.insert(0, TorchWatch)  # type: ignore[arg-type]

# ruff: noqa: E402
# Importing the program comes first, as in real life: it must set the environment before torch is imported.
from strata.serve.__main__ import main

# isort: split
from fake_engine import Control, FakeEngine, FakeStream

from strata.config import StrataConfig
from strata.engine.api import GenerationRequest
from strata.errors import StorageError


class ScriptedEngine(FakeEngine):
    """Steered by environment variables, since it lives in another process."""

    def __init__(self, config: StrataConfig) -> None:
        super().__init__(config)
        time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
        until = os.environ.get("FAKE_LOAD_UNTIL")
        while until and not os.path.exists(until):
            time.sleep(0.01)
        self.control = Control(
            pieces=("a",) * int(os.environ.get("FAKE_PIECES", "3")),
            delay_s=float(os.environ.get("FAKE_DELAY_S", "0")),
            hold="FAKE_HOLD" in os.environ,
        )

    def submit(self, request: GenerationRequest) -> FakeStream:
        print("submitted", flush=True)
        return super().submit(request)

    def shutdown(self, drain_s: float, demote_s: float) -> dict[str, int]:
        unfinished = sum(not stream.ended for stream in self.streams)
        print(f"shutdown called, {unfinished} unfinished, demote within {demote_s:g} s", flush=True)
        if "FAKE_SHUTDOWN_HANGS" in os.environ:
            time.sleep(600)
        if "FAKE_DISK_HANGS" in os.environ and len(self.calls) == 0:
            super().shutdown(drain_s, demote_s)
            raise StorageError("sync of disk root /kv did not finish within 10s: the device may hang")
        return super().shutdown(drain_s, demote_s)


if __name__ == "__main__":
    print(f"OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY')}", flush=True)
    sys.exit(main(load=ScriptedEngine))
