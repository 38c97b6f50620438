"""Makes `strata` importable from this checkout, without its Rust extension if that is not built.

The transfer part needs the kernels' source and a few Python files alone, so it runs on a machine without Rust: then
the package is given to Python without its `__init__`, which asks for the extension. Packages that Strata reads real
models with, and that images for GPUs do not have, are stood in for: the models here are random.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
FOR_REAL_MODELS = ("safetensors", "tokenizers", "gguf", "jinja2", "huggingface_hub")


class _StandIn(ModuleType):
    """A module that is not there: whatever is imported from it is an exception class that nobody raises."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


class _StandIns(MetaPathFinder, Loader):
    """Finds some packages, and all modules in them."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def stand_in_for_missing(names: tuple[str, ...] = FOR_REAL_MODELS) -> list[str]:
    """Lets packages that are missing be imported. Returns their names."""
    missing = [name for name in names if not _is_there(name)]
    for name in missing:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _StandIns(frozenset(missing)))
    return missing


def _is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def add_strata(root: Path = ROOT) -> str | None:
    """Puts the checkout on the path. Returns why the engine cannot run, or None if it can."""
    sys.path.insert(0, str(root / "python"))
    stand_in_for_missing()
    try:
        importlib.import_module("strata")
    except ImportError as error:
        for name in [name for name in sys.modules if name == "strata" or name.startswith("strata.")]:
            del sys.modules[name]
        package = ModuleType("strata")
        package.__path__ = [str(root / "python" / "strata")]
        sys.modules["strata"] = package
        return f"strata's extension is not built ({error}): pip install maturin, then `maturin develop --release`"
    return None
