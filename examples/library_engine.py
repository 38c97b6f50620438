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
            messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
            # The template writes the special tokens itself. Without one (base models), encode the text as it is.
            chat = engine.tokenizer.apply_chat_template(messages)
            prompt = engine.tokenizer.encode(chat, add_special_tokens=False)
            print(f"{question} ", end="")
            for chunk in engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=16))):
                print(chunk.text, end="", flush=True)
                if chunk.usage:
                    print(f"\n{len(prompt)} prompt tokens, {chunk.usage.sources.cached} of them reused")


if __name__ == "__main__":
    main()
