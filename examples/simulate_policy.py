"""A new order of the queue against first come, first served: who has least to load goes first."""

from __future__ import annotations

from collections.abc import Sequence

from strata.simulate import WaitingRequest, configure, simulate


class ShortestLoadFirst:
    """Of those who need not wait for what another computes."""

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[int]:
        able = [request for request in waiting if not request.deferred]
        return [request.id for request in sorted(able, key=lambda request: request.host_tokens)]


def main() -> None:
    workload = {"queries": 150, "contexts": 20, "rate": 6.0}
    overrides = {"workload": workload, "warm": True, "hardware": {"device_bytes": 60e9}}
    config = configure("h200", "qwen2.5-14b", "sglang-hicache", "loogle", overrides)
    for name, policy in (("fcfs", None), ("shortest load first", ShortestLoadFirst())):
        print(f"{name}: mean TTFT {simulate(config, policy)['ttft']['mean']:.2f} s")


if __name__ == "__main__":
    main()
