"""Figure 12, a sketch: the longer a context takes to be computed and the more requests come, the more of them miss
what another is computing at that moment.
"""

from __future__ import annotations

from strata.simulate.figures.drawing import Drawing, Panel, Point, Series
from strata.simulate.figures.study import Case, Overrides, Study, estimate, hit_rate, plain
from strata.simulate.figures.sweeps import requests_of_agent

CAPTION = (
    "The paper replays Mooncake's tool-agent trace at 1, 10 and 100 requests per second against a cache that evicts "
    "nothing, and draws the hit rate over the time that a miss takes to be resolved, up to a second per 1,000 "
    "tokens. Here a generator stands for the trace, the cache is a device of ample memory, delay hits are not "
    "deferred, and the time is changed by scaling the device's speed; it is shown as the mean TTFT that results, "
    "queues included. Only the shape is meant."
)
REQUESTS_PER_S = (1.0, 10.0, 100.0)
REQUESTS = 3000
SPEEDS = (16.0, 4.0, 1.0)
QUICK_SPEEDS = (4.0, 1.0)
AMPLE = 16.0
"""Times the device's memory: nothing is evicted."""
NO_LIMIT = 100_000
"""Requests in flight: the trace does not wait for answers."""


def draw(study: Study) -> Drawing:
    """Hit rate over TTFT, a line for each rate."""
    speeds = QUICK_SPEEDS if study.quick else SPEEDS
    keys = [(rate, speed) for rate in REQUESTS_PER_S for speed in speeds]
    cases = [
        Case(
            "h200",
            "llama-3.1-8b",
            "no-hierarchy",
            "tool-agent",
            {"hardware": faster(study, speed), "workload": at_rate(study, rate), "max_in_flight": NO_LIMIT},
        )
        for rate, speed in keys
    ]
    points = {
        key: Point(estimate(reports, lambda one: one["ttft"]["mean"]), estimate(reports, hit_rate))
        for key, reports in zip(keys, study.reports(cases), strict=True)
    }
    series = [
        Series(f"{rate:g} requests/s", [points[rate, speed] for speed in speeds]) for rate in REQUESTS_PER_S
    ]
    return Drawing(
        [Panel("tool-agent", "mean TTFT (s)", "share of prompt tokens that hit", series, x_log=True)]
    )


def faster(study: Study, times: float) -> Overrides:
    """A device that many times as fast, of ample memory."""
    hardware = plain(study.table["hardware"]["h200"])
    return {
        "peak_flops": hardware["peak_flops"] * times,
        "memory_bandwidth": hardware["memory_bandwidth"] * times,
        "step_overhead_s": hardware["step_overhead_s"] / times,
        "device_bytes": hardware["device_bytes"] * AMPLE,
    }


def at_rate(study: Study, requests_per_s: float) -> Overrides:
    """The generator with all its times scaled so that requests come at about this rate."""
    workload = plain(study.table["workloads"]["tool-agent"])
    times = requests_per_s / (workload["agents_per_second"] * requests_of_agent(workload))
    return {
        "requests": REQUESTS,
        "agents_per_second": workload["agents_per_second"] * times,
        "fan_spread_s": workload["fan_spread_s"] / times,
        "pause_s": {**workload["pause_s"], "mean": workload["pause_s"]["mean"] / times},
    }
