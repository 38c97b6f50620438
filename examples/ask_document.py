"""Asks a question about a text file of yours through the OpenAI client, and says where the prompt's tokens came from.

    python examples/ask_document.py FILE QUESTION [--url http://127.0.0.1:8000]

FILE is plain text in UTF-8, no PDF. Ask a second question about the same file: only the question is computed. Start the
server with `make serve`; for one with `--api-key`, put the key into OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import httpx
from openai import APIConnectionError, APIError, APIStatusError, OpenAI

TIERS = {"device": "the device", "host": "host memory", "disk": "disk", "computed": "computing them"}


def model_of(client: OpenAI, url: str) -> str:
    """The model that the server serves; ends the program with a sentence if there is no server."""
    try:
        return client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"no server answers at {url}: start one with `make serve`, or name another with --url")


def ask(client: OpenAI, model: str, document: str, question: str, max_tokens: int) -> None:
    """Streams the answer to standard output."""
    print(f"reading {len(document):,} characters ...", file=sys.stderr, flush=True)
    stream = client.chat.completions.create(
        model=model,
        # The document comes first: what follows it does not change where its tokens stand.
        messages=[{"role": "user", "content": f"{document}\n\n{question}"}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            usage = chunk.usage.model_dump()
            sources = [f"{usage['strata'][tier]:,} from {name}" for tier, name in TIERS.items()]
            print(f"\n\n{usage['prompt_tokens']:,} prompt tokens: {', '.join(sources)}.")
            print(f"First token after {usage['strata']['ttft_s']:.2f} s.")


def text_of(file: Path) -> str:
    """The file's text; ends the program with a sentence if there is none."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        sys.exit(f"{file} is no UTF-8 text (byte {error.start:,}): export or convert it to plain text first")
    except OSError as error:
        sys.exit(f"{file} cannot be read: {error.strerror}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a question about a text file.")
    parser.add_argument("file", type=Path, help="plain text in UTF-8, no PDF")
    parser.add_argument("question", help="what to ask about it, as one argument in quotes")
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="the server, with or without /v1 (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="tokens of the answer at most (default: %(default)s)"
    )
    chosen = parser.parse_args()
    document = text_of(chosen.file)
    url = chosen.url.rstrip("/").removesuffix("/v1") + "/v1"
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "unused"))
    try:
        ask(client, model_of(client, chosen.url), document, chosen.question, chosen.max_tokens)
    except BrokenPipeError:
        # Whoever read the answer has gone; Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except APIStatusError as error:
        sys.exit(f"the server refused: {error.message}")
    except (APIError, httpx.HTTPError) as error:
        sys.exit(f"\nthe answer broke off: {error}")


if __name__ == "__main__":
    main()
