"""A model folder of a megabyte, made on the spot: random weights, a byte-level vocabulary, any chat template.

Its answers mean nothing; they are computed, cached and streamed like any other model's.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 4096
CORPUS = (
    "You are a helpful assistant. What is a cache, and why does a document come back sooner the second time? "
    "It is kept in tiers: what was computed once is not computed again. Question, answer, document, page, tier. "
) * 4


def make_folder(folder: Path, chat_template: str = "", special_tokens: tuple[str, ...] = ()) -> Path:
    """Writes the folder. The first special token is the end of an answer, which random weights hardly ever choose."""
    folder.mkdir(parents=True)
    special = special_tokens or ("<|end|>",)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [CORPUS], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": special[0], "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.token_to_id(special[0]),
        bos_token_id=None,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
