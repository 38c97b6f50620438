"""Steps on several streams: whatever moves or writes pages comes after all that were reported, not after the last."""

from __future__ import annotations

from mover_world import LAYERS, Transfer, World

from strata.device.cuda_runtime import Event, Stream
from strata.device.fake_cuda import FakeCudaRuntime
from strata.device.step_fence import StepFence


class Gate:
    """Holds a stream of a fake until `open`: what is queued there afterwards does not run before."""

    def __init__(self, fake: FakeCudaRuntime, stream: Stream) -> None:
        self._fake = fake
        self._event: Event = fake.create_event()
        fake._events[self._event].queued += 1
        fake.stream_wait_event(stream, self._event)

    def open(self) -> None:
        self._fake._events[self._event].reached += 1
        self._fake.drain()


def test_a_transfer_waits_for_every_stream_that_reported() -> None:
    fake = FakeCudaRuntime(1)
    world = World(1, fake)
    other = fake.create_stream()
    gate = Gate(fake, world.compute)

    def write() -> None:
        for layer in range(LAYERS):
            world.write("device", 3, 8, layer)

    fake.run(world.compute, write)
    world.mover.step_done(world.compute)
    world.mover.step_done(other)
    number = world.queue.submit(Transfer("backup", [3], [5]))
    for _ in range(20):
        world.mover.look()
        fake.drain()
    assert world.queue.transfers[number].end is None, "it did not wait for the slower stream"
    gate.open()
    for _ in range(20):
        world.mover.look()
        fake.drain()
    assert world.queue.transfers[number].end == (1, None)
    for layer in range(LAYERS):
        world.check("host", 5, 8, layer, "backed up")
    assert world.wrong == [] and world.mover.close()


def test_a_stream_that_begins_a_step_waits_for_the_others_and_not_for_itself() -> None:
    fake = FakeCudaRuntime(1)
    fence, ran = StepFence(fake), list[str]()
    first, second = fake.create_stream(), fake.create_stream()
    fence.hold(second)  # nothing was prepared
    fence.prepare()
    fence.hold(second)  # nothing was reported
    gate = Gate(fake, first)
    fake.run(first, lambda: ran.append("first"))
    fence.step_done(first)
    waits = fake.calls["stream_wait_event"]
    fence.step_done(first)
    fence.hold(first)
    assert fake.calls["stream_wait_event"] == waits, "one stream costs no wait"
    fence.hold(second)
    fake.run(second, lambda: ran.append("second"))
    fake.drain()
    assert ran == []
    gate.open()
    assert ran == ["first", "second"]
    fence.close()
    fence.close()
    fence.step_done(first)  # nobody is left to wait for it
