"""What a report holds. Times are seconds, tokens are counts, shares lie between 0 and 1."""

from __future__ import annotations

from typing import TypedDict


class Distribution(TypedDict):
    """Mean and quantiles (by nearest rank) of `count` values, in the unit of the field that holds it."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class TokensBySource(TypedDict):
    """Prompt tokens by where they came from: found on the device, loaded from host, read from disk, computed."""

    device: int
    host: int
    disk: int
    computed: int


class Stalls(TypedDict):
    """Seconds in which the device did not compute, by cause.

    `prefill_load_s` and `decode_load_s`: within a step, for a layer's load. `waiting_s`: requests were there and
    nothing was planned. `empty_s`: no request was there.
    """

    prefill_load_s: float
    decode_load_s: float
    waiting_s: float
    empty_s: float


class RequestReport(TypedDict):
    """One request: seconds from the start to its submission, from there to its first and last token; prompt tokens
    that were computed."""

    submitted_s: float
    ttft_s: float
    latency_s: float
    computed: int


class _Optional(TypedDict, total=False):
    requests: list[RequestReport]


class Report(_Optional):
    """What a simulation came to.

    `duration_s`: virtual seconds from the start to the last token. `ttft`: seconds from submission to the first token;
    `ttft_from_due`: from when the client was ready to submit, which the limit of requests in flight may delay.
    `time_per_output_token`: seconds. `load_per_compute`: loaded tokens per computed token of each prefill batch;
    `load_per_compute_at`: the part of the batches with at most 0, 200, 500. `prefill_stall_share`: stalls for loads, of
    the time of prefill steps. `device_busy_share`: of the whole run. `link_busy_s`: seconds in which something moved to
    the device, to the host, from disk, to disk. `steps`: prefill and decode. `pages`: of device, host and disk.
    `requests`: one by one, only if the configuration has `list_requests`.
    """

    system: str
    hardware: str
    seed: int
    finished: int
    refused: int
    duration_s: float
    ttft: Distribution
    ttft_from_due: Distribution
    time_per_output_token: Distribution
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: TokensBySource
    load_per_compute: Distribution
    load_per_compute_at: list[float]
    prefill_busy_s: float
    decode_busy_s: float
    stalls: Stalls
    prefill_stall_share: float
    device_busy_share: float
    link_busy_s: list[float]
    steps: list[int]
    preemptions: int
    early_loads: int
    pages: list[int]
