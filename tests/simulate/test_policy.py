"""The policy hook: its order is followed, what it says wrong ends the simulation in words, and nobody starves."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from small import Order, at_once, in_turn, small

from strata.errors import StrataError
from strata.simulate import WaitingRequest, simulate, simulate_traced

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "simulate_policy.py"


def shortest_first(waiting: Sequence[WaitingRequest]) -> list[int]:
    return [request.id for request in sorted(waiting, key=lambda request: request.compute_tokens)]


def longest_first(waiting: Sequence[WaitingRequest]) -> list[int]:
    return shortest_first(waiting)[::-1]


def finished_in_order(
    tokens: list[int], choose: Callable[[Sequence[WaitingRequest]], list[int]]
) -> list[int]:
    """Requests by when their first token came, one prompt in a batch at a time."""
    config = at_once(tokens)
    config["system"] = {**config["system"], "batch_tokens": min(tokens)}
    requests = simulate(config, Order(choose))["requests"]
    return sorted(range(len(tokens)), key=lambda request: requests[request]["ttft_s"])


def test_the_order_is_followed() -> None:
    tokens = [4000, 1000, 3000, 2000]
    assert finished_in_order(tokens, in_turn) == [0, 1, 2, 3]
    assert finished_in_order(tokens, shortest_first) == [1, 3, 2, 0]
    assert finished_in_order(tokens, longest_first) == [0, 2, 3, 1]


def test_the_queue_s_own_order_is_first_come_first_served() -> None:
    # Nobody counts as deferred, so that nobody takes a run over either.
    config = small(system={"deferral_tokens": 4_000_000_000})
    order = Order(in_turn)
    assert simulate(config, order) == simulate(config)
    assert len(order.asked) > 40


def test_equal_hooks_give_equal_reports() -> None:
    first, second = (simulate_traced(small(), Order(longest_first)) for _ in range(2))
    assert first == second
    assert first.report != simulate(small())


def test_what_the_hook_is_told_is_true() -> None:
    order = Order(in_turn)
    simulate(small(), order)
    clock = [now for now, _ in order.asked]
    assert clock == sorted(clock)
    for now, waiting in order.asked:
        assert waiting, "nobody is asked about nobody"
        assert [request.arrived_s for request in waiting] == sorted(request.arrived_s for request in waiting)
        for request in waiting:
            assert request.waited_s == pytest.approx(now - request.arrived_s)
            assert request.compute_tokens >= max(1, request.transient_tokens + request.disk_tokens)
            assert not request.deferred or request.transient_tokens > 100
    told = [request for _, waiting in order.asked for request in waiting]
    assert any(request.host_tokens for request in told) and any(request.device_tokens for request in told)


def test_deferred_requests_may_be_left_out() -> None:
    def undeferred(waiting: Sequence[WaitingRequest]) -> list[int]:
        return [request.id for request in waiting if not request.deferred]

    order = Order(undeferred)
    config = small(warm=False)
    report = simulate(config, order)
    assert report["finished"] == 40
    assert any(request.deferred for _, waiting in order.asked for request in waiting)
    assert report["prompt_tokens"]["computed"] < simulate(config)["prompt_tokens"]["computed"]


def test_whoever_has_waited_for_too_long_goes_whatever_the_hook_says() -> None:
    config = at_once([2000, 1000, 1000, 1000])
    config["system"] = {**config["system"], "max_wait_s": 1e-3, "batch_tokens": 1000, "max_running": 1}
    order = Order(lambda waiting: [request.id for request in waiting if request.id != 1][:1])
    report = simulate(config, order)
    assert report["finished"] == 4
    assert all(request.waited_s <= 1e-3 for _, waiting in order.asked for request in waiting)


def test_naming_nobody_while_nothing_runs_is_an_error_not_a_hang() -> None:
    with pytest.raises(StrataError, match="names nobody while nothing runs and 4 requests wait"):
        simulate(at_once([1000] * 4), Order(lambda _: []))


@pytest.mark.parametrize("answer", [[99], [0, 0], [-1], ["0"], None, [0.5]])
def test_an_answer_that_makes_no_sense_is_an_error(answer: list[int]) -> None:
    with pytest.raises(StrataError, match=r"the policy's order (names request|failed)"):
        simulate(at_once([1000] * 4), Order(lambda _: answer))


def test_what_the_hook_raises_is_the_cause() -> None:
    def broken(waiting: Sequence[WaitingRequest]) -> list[int]:
        raise LookupError(f"lost {len(waiting)}")

    with pytest.raises(StrataError, match=r"the policy's order failed at 0\.000 s.*lost 4") as told:
        simulate(at_once([1000] * 4), Order(broken))
    assert isinstance(told.value.__cause__, LookupError)


def test_an_interrupt_in_the_hook_stays_one() -> None:
    def interrupted(_: Sequence[WaitingRequest]) -> list[int]:
        raise KeyboardInterrupt

    order = Order(interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulate(at_once([1000] * 4), order)
    assert len(order.asked) == 1, "nothing is asked afterwards"


def test_the_example_is_short_and_its_order_wins(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 30
    spec = importlib.util.spec_from_file_location("simulate_policy", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main()
    means = [float(mean) for mean in re.findall(r"mean TTFT (\d+\.\d+) s", capsys.readouterr().out)]
    assert len(means) == 2 and means[1] < means[0]
