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
from strata.models.config import ModelConfig, load_config
from strata.models.decoder import CausalLM, ForwardBatch, pool_shape, tiny_random_model
from strata.models.default_model import convert_gguf_once, ensure_default_model
from strata.models.fingerprint import fingerprint_files, model_files
from strata.models.generation_defaults import generation_defaults
from strata.models.hub import fetch_from_hub, parse_hub_id
from strata.models.rope import RopeScaling
from strata.models.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from strata.models.weights import WeightFiles

DEFAULT_MODEL = "default"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. ``path`` is its Hugging Face folder, ``files`` what its fingerprint covers, ``name`` what
    it is called where nobody has given it a name."""

    model: CausalLM
    tokenizer: Tokenizer
    config: ModelConfig
    path: Path
    files: list[Path]
    name: str


def resolve_model(name_or_path: str | Path, cache_dir: Path | None = None) -> Path:
    """The Hugging Face folder for ``default``, a folder, a .gguf file or a hub id; a .gguf is converted once, a hub id
    downloaded once. What is there as a folder or a file is that, whatever the hub holds under the same name."""
    name = str(name_or_path)
    if name == DEFAULT_MODEL:
        return ensure_default_model(cache_dir)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return convert_gguf_once(path, cache_dir)
    wanted = parse_hub_id(name)
    if wanted is not None:
        return fetch_from_hub(wanted)
    raise ModelError(
        f"--model {name!r} is neither 'default', a folder, a .gguf file nor a name on the hub (org/name); "
        "check the path"
    )


def model_name(name_or_path: str | Path) -> str:
    """What a model is called where nobody has given it a name: its hub id, or the name of its folder or file."""
    name = str(name_or_path)
    if name == DEFAULT_MODEL:
        return DEFAULT_MODEL_NAME
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute().name
    wanted = parse_hub_id(name)
    return path.stem if wanted is None else wanted.repository


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
    return LoadedModel(model, tokenizer, config, folder, model_files(folder), model_name(name_or_path))


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
    "generation_defaults",
    "load_model",
    "load_tokenizer",
    "model_files",
    "model_name",
    "pool_shape",
    "resolve_model",
    "tiny_random_model",
]
