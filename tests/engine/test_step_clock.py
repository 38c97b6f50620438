"""Which steps are measured."""

from __future__ import annotations

from strata.engine.step_clock import MeasuredStep, StepClock


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


def queue(
    clock: StepClock, row: tuple[int, int] | None, began: float, ended: float | None, loading: bool = False
) -> MeasuredStep | None:
    """A step that samples nothing; `ended` is when the one before was seen to end, None if it was over."""
    now = began + 0.1 if ended is None else ended
    found = clock.queued(row, began, loading, ended is not None, now)
    assert clock.busy_s(0.1, [False], loading) == 0.0
    return found


def test_a_chunk_is_measured_when_the_next_one_is_queued() -> None:
    clock = StepClock(runs_behind=True)
    assert queue(clock, (64, 0), 10.0, None) is None
    assert queue(clock, (64, 64), 10.2, 13.0) == MeasuredStep(64, 0, 3.0), (
        "the host had caught up when it began"
    )
    assert queue(clock, (32, 128), 13.1, 17.0) == MeasuredStep(64, 64, 4.0)
    assert clock.busy_s(9.0, [True], False) == 0.0, "it waited for the one before"
    assert queue(clock, (64, 0), 30.0, None) is None, "a step that samples lies between"
    assert queue(clock, (64, 64), 30.2, 33.0) == MeasuredStep(64, 0, 3.0)


def test_a_chunk_whose_beginning_or_end_nobody_saw_is_not_measured() -> None:
    clock = StepClock(runs_behind=True)
    queue(clock, (64, 0), 10.0, None)
    assert queue(clock, (64, 64), 20.0, None) is None, "it was over long before"
    assert queue(clock, (64, 128), 21.0, 24.0) is None, "it began nobody knows when"
    assert queue(clock, None, 24.1, 27.0) == MeasuredStep(64, 128, 3.0)
    assert queue(clock, (64, 0), 27.1, 29.0) is None, "two requests' step"
    assert queue(clock, (64, 64), 29.1, 31.0, loading=True) == MeasuredStep(64, 0, 2.0)
    assert queue(clock, (64, 128), 31.1, 40.0) is None, "a load may have held it up"
    clock.failed()
    assert queue(clock, (64, 0), 41.0, 42.0) is None
