"""PyTorch decoders that read paged K/V through a page table, layer by layer.

This package knows models and nothing of who drives them: `load_model` gives weights, tokenizer and shape, and
`CausalLM.forward` runs one batch over a pool that the caller owns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from strata.errors import ModelError
from strata.models.cache_folder import default_cache_folder
from strata.models.config import ModelConfig, RopeScaling, load_config
from strata.models.default_model import convert_gguf_once, ensure_default_model
from strata.models.fingerprint import fingerprint_files, model_files
from strata.models.llama import CausalLM, ForwardBatch, pool_shape, tiny_random_model
from strata.models.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from strata.models.weights import WeightFiles

DEFAULT_MODEL = "default"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. ``path`` is its Hugging Face folder, ``files`` what its fingerprint covers."""

    model: CausalLM
    tokenizer: Tokenizer
    config: ModelConfig
    path: Path
    files: list[Path]


def resolve_model(name_or_path: str | Path, cache_dir: Path | None = None) -> Path:
    """The Hugging Face folder for ``default``, a folder or a .gguf file; a .gguf is converted once."""
    if str(name_or_path) == DEFAULT_MODEL:
        return ensure_default_model(cache_dir)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return convert_gguf_once(path, cache_dir)
    raise ModelError(
        f"--model {str(name_or_path)!r} is neither 'default', a folder nor a .gguf file; check the path"
    )


def load_model(
    name_or_path: str | Path = DEFAULT_MODEL,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    cache_dir: Path | None = None,
) -> LoadedModel:
    """Load config, tokenizer and weights; a `ModelError` names the file and the remedy if one is unfit."""
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ModelError(f"--dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    folder = resolve_model(name_or_path, cache_dir)
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, config)
    model = CausalLM(config, WeightFiles(folder, config, dtype, torch.device(device)))
    return LoadedModel(model, tokenizer, config, folder, model_files(folder))


__all__ = [
    "DEFAULT_MODEL",
    "DTYPES",
    "CausalLM",
    "ForwardBatch",
    "IncrementalDetokenizer",
    "LoadedModel",
    "ModelConfig",
    "RopeScaling",
    "Tokenizer",
    "default_cache_folder",
    "ensure_default_model",
    "fingerprint_files",
    "load_model",
    "load_tokenizer",
    "model_files",
    "pool_shape",
    "resolve_model",
    "tiny_random_model",
]
