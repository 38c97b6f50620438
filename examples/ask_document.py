"""Asks a question about a text file of yours through the OpenAI client, and says where the prompt's tokens came from.

    python examples/ask_document.py FILE QUESTION [--url http://127.0.0.1:8000/v1]

Ask a second question about the same file: only the question is computed. Start the server with `make serve`; a server
with `--api-key` takes the key from OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from openai import APIConnectionError, APIStatusError, OpenAI

TIERS = {"device": "the device", "host": "host memory", "disk": "disk", "computed": "computing them"}


def ask(client: OpenAI, document: str, question: str, max_tokens: int) -> None:
    """Streams the answer to standard output."""
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a question about a text file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=256)
    chosen = parser.parse_args()
    try:
        document = chosen.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"{chosen.file} cannot be read as UTF-8 text: {error}")
    client = OpenAI(base_url=chosen.url, api_key=os.environ.get("OPENAI_API_KEY", "unused"))
    try:
        ask(client, document, chosen.question, chosen.max_tokens)
    except BrokenPipeError:
        # Whoever read the answer has gone; Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except APIConnectionError:
        sys.exit(f"no server answers at {chosen.url}: start one with `make serve`")
    except APIStatusError as error:
        sys.exit(f"the server refused: {error.message}")


if __name__ == "__main__":
    main()
