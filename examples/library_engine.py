"""The whole engine without HTTP: a model, its tiers and its scheduler in this process. MODEL is a Hugging Face
folder, a .gguf file or `default`.

    python examples/library_engine.py [MODEL]
"""

from __future__ import annotations

import sys

from strata import Engine, GenerationRequest, SamplingParams, StrataConfig


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "default"
    with Engine(StrataConfig.of(model=model, host_memory="512MiB", disk_capacity="0")) as engine:
        document = "A page holds the keys and values of a few tokens. " * 12
        for question in ("What is a page?", "What is a value?"):
            prompt = engine.tokenizer.encode(f"{document}\n{question}")
            for chunk in engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=8))):
                print(chunk.text, end="", flush=True)
                if chunk.usage:
                    print(f"\n{len(prompt)} prompt tokens, {chunk.usage.sources.cached} of them reused")


if __name__ == "__main__":
    main()
