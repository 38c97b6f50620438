"""What the server adds to an answer: requests at a fixed rate, each for one token that the cache all but holds.

A request's HTTP side is what its client waits, from the moment it writes the request to the answer's last byte, less
what the engine says it needed from submission to the token. It holds the client's own part too, so it is no less than
what the server adds. Requests are sent when due, whatever became of those before, each on a connection that is free.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from strata.errors import StrataError

_TIMEOUT_S = 30.0
_PATH = "/v1/completions"


@dataclass
class Timing:
    """Seconds of each request, in the order in which they ended. `late_s`: how much later than due it was sent."""

    total_s: list[float] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    computed_tokens: int = 0

    def add(self, total_s: float, late_s: float, usage: dict[str, Any]) -> None:
        """Takes one answer in."""
        self.total_s.append(total_s)
        self.engine_s.append(float(usage["strata"]["ttft_s"]))
        self.late_s.append(late_s)
        self.computed_tokens += int(usage["strata"]["computed"])


class RawClient:
    """Speaks as much HTTP as it needs, since a client's library would take as long as the server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.connections = 0

    async def ask(self, prompt: Sequence[int], stream: bool) -> tuple[float, dict[str, Any]]:
        """Seconds until the answer's last byte, and its usage. Raises StrataError for any other answer."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps(body).encode()
        head = (
            f"POST {_PATH} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        if not self._free:
            self._free.append(await asyncio.open_connection(self._host, self._port))
            self.connections += 1
        reader, writer = self._free.pop()
        start = time.perf_counter()
        writer.write(head.encode() + content)
        status, answer = await asyncio.wait_for(_answer(reader), _TIMEOUT_S)
        took = time.perf_counter() - start
        self._free.append((reader, writer))
        if status != 200:
            raise StrataError(f"the server answered {status}: {answer[:300].decode(errors='replace')}")
        return took, _usage(answer, stream)

    def close(self) -> None:
        """Closes what is free."""
        for _, writer in self._free:
            writer.close()


async def run(
    url: str, prompts: Sequence[Sequence[int]], rate: float, seconds: float, stream: bool
) -> Timing:
    """Asks every prompt once, then `rate` times a second in turn. Raises StrataError if one is not answered."""
    client = RawClient(url)
    try:
        for prompt in prompts:
            await client.ask(prompt, stream)
        timing = Timing()
        start = time.perf_counter() + 0.1
        requests = []
        for number in range(round(rate * seconds)):
            due = start + number / rate
            await asyncio.sleep(due - time.perf_counter())
            requests.append(asyncio.ensure_future(_ask(client, prompts, number, due, stream, timing)))
        await asyncio.gather(*requests)
        return timing
    finally:
        client.close()


async def _ask(
    client: RawClient, prompts: Sequence[Sequence[int]], number: int, due: float, stream: bool, timing: Timing
) -> None:
    late = time.perf_counter() - due
    took, usage = await client.ask(prompts[number % len(prompts)], stream)
    timing.add(took, late, usage)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of one answer, by its length or in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ", 2)[1])
    _, found, length = head.partition(b"content-length:")
    if found:
        return status, await reader.readexactly(int(length.partition(b"\r\n")[0]))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return status, body


def _usage(answer: bytes, stream: bool) -> dict[str, Any]:
    if not stream:
        usage: dict[str, Any] = json.loads(answer)["usage"]
        return usage
    events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: {")]
    usage = json.loads(events[-1])["usage"]
    return usage
