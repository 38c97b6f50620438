"""Which steps are measured."""

from __future__ import annotations

from strata.engine.step_clock import StepClock


def test_on_the_host_every_step_is() -> None:
    clock = StepClock(runs_behind=False)
    clock.failed()
    assert [clock.busy_s(2.0, samples, True) for samples in ([], [False], [True])] == [2.0, 2.0, 2.0]


def test_on_a_device_of_its_own_the_host_must_have_caught_up() -> None:
    clock = StepClock(runs_behind=True)
    assert clock.busy_s(2.0, [False, True], False) == 2.0
    assert clock.busy_s(2.0, [True], True) == 0.0, "a load may have held it up"
    assert clock.busy_s(2.0, [True], False) == 2.0
    assert clock.busy_s(2.0, [False], False) == 0.0, "it is only queued"
    assert clock.busy_s(2.0, [True], False) == 0.0, "it waited for the one before"
    assert clock.busy_s(2.0, [True], False) == 2.0
    clock.failed()
    assert [clock.busy_s(2.0, [True], False) for _ in range(2)] == [0.0, 2.0]
