"""What an operator should know from the start, though nothing is wrong: shown in the banner and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

from strata.config import ServerOptions, StrataConfig
from strata.engine.api import EngineProtocol
from strata.engine.context import ContextBounds
from strata.serve.binding import is_loopback


def start_notes(engine: EngineProtocol, config: StrataConfig) -> list[str]:
    """Sentences; none for most servers."""
    return [
        *_of_exposure(config.server),
        *_of_context(engine.context),
        *_of_sampling(engine.sampling_defaults),
        *_of_date(engine, config),
    ]


def _of_exposure(options: ServerOptions) -> list[str]:
    if options.api_key or is_loopback(options):
        return []
    can = "ask" if options.admin_api_key else "ask and flush the cache"
    return [
        f"there is no key (--insecure), so everybody who reaches --host {options.host or '(any)'} can {can}; "
        "--api-key KEY (better in the variable STRATA_API_KEY) lets in only those who have it"
    ]


def _of_context(context: ContextBounds) -> list[str]:
    if not context.by_device:
        return []
    return [
        f"the context is {context.tokens:,} tokens and not {context.whole_name}, since the device tier "
        f"holds no more; {context.whole_flag} holds all"
    ]


def _of_sampling(defaults: Mapping[str, float]) -> list[str]:
    if not defaults:
        return []
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.items() if name != "max_tokens")
    limit = f"max_tokens {defaults['max_tokens']:.0f} of chats" if "max_tokens" in defaults else ""
    return [
        f"the model's generation_config.json gives {', '.join(filter(None, (values, limit)))} to requests that leave "
        "them out; --generation-config none takes OpenAI's defaults"
    ]


def _of_date(engine: EngineProtocol, config: StrataConfig) -> list[str]:
    day, tokenizer = config.model.chat_template_date, engine.tokenizer
    if day or tokenizer is None or not tokenizer.template_writes_date:
        return []
    return [
        "the chat template writes today's date into every chat's prompt, so tomorrow nothing of today's chats is "
        f"found in the cache; --chat-template-date {date.today().isoformat()} keeps the date"
    ]
