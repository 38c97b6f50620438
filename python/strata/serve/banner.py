"""The first screen: what was loaded, each tier in a line, what is off and why, what stays on disk, how to
ask."""

from __future__ import annotations

import shlex
import socket

from strata.config import StrataConfig, format_size
from strata.engine.api import EngineProtocol, TierReport
from strata.serve.binding import place_of, url_of
from strata.serve.notes import start_notes
from strata.serve.terminal import Terminal


def show_ready(
    terminal: Terminal, engine: EngineProtocol, config: StrataConfig, bound: socket.socket, loading_s: float
) -> None:
    """Writes everything that an operator needs to know in the first minute."""
    terminal.step(f"Ready after {loading_s:.1f} s")
    terminal.line()
    terminal.row("model", f"{engine.model_name}, context {engine.max_context:,} tokens")
    tiers = engine.tiers()
    for tier in tiers:
        if tier.enabled:
            terminal.row(tier.name, tier_line(tier))
    for tier in tiers:
        if not tier.enabled:
            terminal.row(tier.name, f"off: {tier.off_reason or 'no reason given'}", "yellow")
    if any(tier.name == "disk" and tier.enabled for tier in tiers):
        terminal.row("note", privacy_note(config))
    for note in start_notes(engine, config):
        terminal.row("note", note, "yellow")
    for problem in engine.health().problems:
        terminal.row("problem", problem, "yellow")
    terminal.row("serving", place_of(bound), "bold green")
    terminal.line()
    terminal.line("  " + curl_line(url_of(bound), needs_key=bool(config.server.api_key)))
    terminal.line()


def tier_line(tier: TierReport) -> str:
    """E.g. `0.3 of 10.0 GiB used, 12,000 tokens | ~/.cache/strata/kv, 4 threads`."""
    used = f"{format_size(tier.used_bytes)} of {format_size(tier.capacity_bytes)} used"
    return f"{used}, {tier.used_tokens:,} tokens" + (f" | {tier.detail}" if tier.detail else "")


def privacy_note(config: StrataConfig) -> str:
    """That prompts outlive the server, where, and how to change it."""
    return (
        f"the tokens of all prompts and answers are kept on disk in {config.cache.disk_path}, readable "
        "by this user only; --disk-capacity 0 stops that"
    )


def curl_line(url: str, needs_key: bool) -> str:
    """A command that a newcomer can paste."""
    key = ' -H "Authorization: Bearer $STRATA_API_KEY"' if needs_key else ""
    body = shlex.quote('{"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}')
    return f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d {body}"
