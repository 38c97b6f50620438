"""The flags of `bench serve`, checked before anything is started, and the workload that they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from strata.bench.corpus import Document
from strata.bench.load.cache_distance import Distances
from strata.bench.load.chats import ChatsWorkload
from strata.bench.load.client import CHAT, COMPLETIONS
from strata.bench.load.documents import DocumentsWorkload, cut, load_documents
from strata.bench.load.plot import check_plot
from strata.bench.load.schedule import Draw, Workload, sample_words
from strata.bench.load.server import WARM_TIERS, ServerFacts
from strata.bench.load.trace import Fit, TraceRequest, TraceWorkload, read_trace
from strata.bench.report import JSON_HELP, check_json_path
from strata.bench.settings import ENGINE_FLAGS_HELP, check_least
from strata.errors import ConfigError

WORKLOADS = ("documents", "chat", "trace")
_DEFAULT_RATES = "1"
_DEFAULT_DURATION_S = 60.0
_SAMPLE_CHARACTERS = 2000
_SAMPLES = 8
_SPARE_TOKENS = 64
"""What a question, a chat template and a document's heading may take beside the text."""
_LENGTH_ERROR = 1.1
"""How much longer a text may be than its estimate says: characters a token differ from text to text."""

Number = TypeVar("Number", int, float)


def parser_of(program: str) -> argparse.ArgumentParser:
    """The flags of this measurement; what it does not know is left to `strata.config`."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Loads an OpenAI-compatible server with requests that arrive by themselves, and tells what its "
        "clients see. Without --url it starts `strata serve` and stops it again.",
        epilog=ENGINE_FLAGS_HELP
        + " With --url the server has its own flags, and none of them is taken here; the "
        "environment's OPENAI_API_KEY is sent to it.",
    )
    _add_server_flags(parser.add_argument_group("server"))
    _add_arrival_flags(parser.add_argument_group("arrivals"))
    _add_workload_flags(parser.add_argument_group("workload"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help=JSON_HELP)
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the result as .png, .svg or .pdf (extra `plot`)"
    )
    return parser


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", help="a server that runs, e.g. http://127.0.0.1:8000")
    group.add_argument("--model", help="with --url: the model's id; without: what `strata serve` loads")
    group.add_argument(
        "--endpoint",
        choices=(COMPLETIONS, CHAT),
        help="which route is asked (default: chat for --workload chat, else completions)",
    )
    group.add_argument(
        "--warm",
        nargs="?",
        const="host",
        choices=tuple(WARM_TIERS),
        help="before each run send every document once, then (Strata only) empty the tiers above the one named, so "
        "that it holds everything it can (without a tier: host)",
    )
    group.add_argument(
        "--keep-documents",
        action="store_true",
        help="the same documents in all runs, and no flush but before the first: a later warm start finds them in the "
        "cache, beside what is left of earlier questions",
    )
    group.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="let answers end by themselves; for servers that refuse the field ignore_eos",
    )
    group.add_argument(
        "--characters-per-token",
        type=float,
        help="how long a token is; default: the server is asked to count some text",
    )
    group.add_argument(
        "--request-timeout-s",
        type=float,
        default=600.0,
        help="a request that takes longer has failed (default: 600)",
    )


def _add_arrival_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rates",
        help="requests a second, Poisson, with commas between; default: 1, and with --workload trace its own times",
    )
    group.add_argument(
        "--seeds", default="1", help="a run for each rate and seed, with commas between (default: 1)"
    )
    group.add_argument(
        "--duration",
        type=float,
        help="seconds in which sessions arrive (default: 60, unless --requests ends it)",
    )
    group.add_argument(
        "--requests",
        "--max-requests",
        type=int,
        dest="requests",
        help="most requests of a run",
    )
    group.add_argument(
        "--max-in-flight",
        type=int,
        default=128,
        help="most requests that the server has at once; others wait on the client (default: 128)",
    )


def _add_workload_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workload", choices=WORKLOADS, default="documents", help="(default: documents)")
    group.add_argument(
        "--docs",
        type=Path,
        metavar="PATH",
        help="a file in LooGLE's form, or a folder of .jsonl, .txt and .md; default: Python's help topics",
    )
    group.add_argument("--documents", type=int, default=16, help="pieces that are asked about (default: 16)")
    group.add_argument(
        "--cold-documents",
        type=int,
        default=0,
        help="so many of --documents are left out of the warm start and new in every run (default: 0)",
    )
    group.add_argument("--tokens", type=int, default=2000, help="tokens of a piece, about (default: 2000)")
    group.add_argument(
        "--max-tokens",
        type=int,
        help="tokens of every answer (default: 16); with --workload trace the most (default: the trace's)",
    )
    group.add_argument(
        "--questions", type=int, help="how often each document is asked about (default: until the run ends)"
    )
    group.add_argument(
        "--min-distance",
        type=int,
        default=0,
        help="least cache distance: other documents' requests between two of one document (default: 0)",
    )
    group.add_argument("--max-distance", type=int, help="most cache distance (default: no bound)")
    group.add_argument("--rounds", type=int, default=4, help="rounds of a chat (default: 4)")
    group.add_argument(
        "--think-s", type=float, default=2.0, help="mean seconds between a chat's rounds (default: 2)"
    )
    group.add_argument("--trace", type=Path, metavar="FILE", help="a trace in Mooncake's form")
    group.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        help="seconds for each of the trace's; 0.1 is ten times as fast",
    )
    group.add_argument(
        "--length-scale", type=float, default=1.0, help="tokens for each of the trace's; 0.1 for small models"
    )
    group.add_argument(
        "--max-prompt-tokens",
        type=int,
        help="longer prompts of the trace are cut (default: what the server's context holds)",
    )


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError for what cannot be measured."""
    check_least(
        options,
        (("max_in_flight", 1), ("documents", 1), ("tokens", 16), ("rounds", 1), ("min_distance", 0)),
    )
    for name in ("requests", "max_tokens", "questions", "max_prompt_tokens"):
        if getattr(options, name) is not None:
            check_least(options, ((name, 1),))
    for name in ("duration", "characters_per_token", "request_timeout_s", "time_scale", "length_scale"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {value:g} must be above 0")
    if not 0 <= options.think_s < float("inf"):
        raise ConfigError(f"--think-s {options.think_s:g} must be at least 0")
    if options.url is not None:
        _check_url(options.url)
    if options.workload == "trace" and options.trace is None:
        raise ConfigError("--workload trace needs --trace FILE, a trace in Mooncake's form")
    if options.workload != "trace" and options.trace is not None:
        raise ConfigError(f"--trace {options.trace.name} needs --workload trace")
    if options.workload == "chat" and options.endpoint == COMPLETIONS:
        raise ConfigError(
            "--workload chat resends a history, and --endpoint completions has none; leave it out"
        )
    if options.cold_documents and (options.workload != "documents" or options.warm is None):
        raise ConfigError("--cold-documents is for --workload documents with --warm: without, all are cold")
    if not 0 <= options.cold_documents < options.documents:
        raise ConfigError(
            f"--cold-documents {options.cold_documents} must be from 0 to one below --documents {options.documents}"
        )
    if options.keep_documents and (options.workload != "documents" or options.warm is None):
        raise ConfigError(
            "--keep-documents is for --workload documents with --warm: without, a run would find what others left"
        )
    check_json_path(options.json)
    if options.plot is not None:
        check_plot(options.plot)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        whole = (
            parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        whole = False
    if not whole:
        raise ConfigError(f"--url {url!r} is no server's address; give one such as http://127.0.0.1:8000")


def endpoint_of(options: argparse.Namespace) -> str:
    """The route that is asked."""
    chosen: str | None = options.endpoint
    return chosen or (CHAT if options.workload == "chat" else COMPLETIONS)


def draws_of(options: argparse.Namespace) -> list[Draw]:
    """Every run: all seeds of the first rate, then of the next. Raises ConfigError."""
    rates: list[float | None] = [None]
    if options.workload != "trace" or options.rates is not None:
        rates = [*_numbers("--rates", options.rates or _DEFAULT_RATES, float)]
    seeds = _numbers("--seeds", options.seeds, int)
    duration = options.duration
    if duration is None and options.requests is None and options.workload != "trace":
        duration = _DEFAULT_DURATION_S
    for rate in rates:
        if rate is not None and not 0 < rate < float("inf"):
            raise ConfigError(f"--rates {rate:g} must be above 0")
    keeps = options.keep_documents
    return [Draw(seed, rate, options.requests, duration, keeps) for rate in rates for seed in seeds]


def _numbers(flag: str, text: str, read: Callable[[str], Number]) -> list[Number]:
    try:
        found = [read(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} are no numbers with commas between, such as 1,2") from error
    if len(set(found)) < len(found):
        raise ConfigError(
            f"{flag} {text} names a number twice, and both runs would be the same; name it once"
        )
    return found


class Source:
    """What a workload is made of, read before a server is started."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._trace: tuple[TraceRequest, ...] = ()
        self._documents: list[Document] = []
        if options.workload == "trace":
            self._trace = read_trace(options.trace, options.requests)
        else:
            self._documents = load_documents(options.docs)

    def samples(self, facts: ServerFacts) -> Sequence[str]:
        """Texts by which a token's length is learnt; short enough for the context if each byte were a token."""
        size = min(_SAMPLE_CHARACTERS, (facts.max_tokens or _SAMPLE_CHARACTERS * 4) // 4)
        if self._trace:
            return sample_words(size)
        return [document.text[:size] for document in self._documents[:_SAMPLES]]

    def workload(self, facts: ServerFacts, characters_per_token: float) -> Workload:
        """The workload, fitted to the server. Raises ConfigError if it does not fit."""
        options = self._options
        if self._trace:
            return TraceWorkload(self._trace, self._fit(facts, characters_per_token))
        max_tokens = options.max_tokens or 16
        rounds = options.rounds if options.workload == "chat" else 1
        needed = options.tokens + rounds * (max_tokens + _SPARE_TOKENS)
        if facts.max_tokens is not None and needed > facts.max_tokens:
            raise ConfigError(
                f"a request may take {needed} tokens (--tokens {options.tokens}, and for each of {rounds} rounds "
                f"--max-tokens {max_tokens} and {_SPARE_TOKENS} for the question), and the model's context has "
                f"{facts.max_tokens}; lower one of them"
            )
        pieces = cut(self._documents, options.tokens, options.documents, characters_per_token)
        if options.workload == "chat":
            return ChatsWorkload(pieces, options.rounds, options.think_s, max_tokens)
        distances = Distances(options.min_distance, options.max_distance, options.questions)
        return DocumentsWorkload(pieces, distances, max_tokens, options.cold_documents)

    def _fit(self, facts: ServerFacts, characters_per_token: float) -> Fit:
        options = self._options
        prompt, output = options.max_prompt_tokens, options.max_tokens
        if facts.max_tokens is not None:
            # Neither may leave the other without room.
            output = min(output or facts.max_tokens, facts.max_tokens // 4)
            room = int((facts.max_tokens - output - _SPARE_TOKENS) / _LENGTH_ERROR)
            prompt = max(1, min(prompt or room, room))
        return Fit(options.time_scale, options.length_scale, prompt, output, characters_per_token)
