"""The house holds together: one version, crates and stubs as promised, documented commands that exist."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import strata
from strata import _core

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CRATES = sorted(manifest.parent.name for manifest in ROOT.glob("rust/*/Cargo.toml"))
# Optional packages of no extra: the code goes on without them, or names them in its message.
ASKED_FOR_BY_NAME = {"flashinfer", "pyarrow", "transformers"}
UNSAFE_CRATES = {"strata-copy", "strata-disk", "strata-py"}
PYTHON_CRATES = {"pyo3", "pyo3-ffi", "numpy", "strata-py"}
TENSOR_CRATES = {"tch", "ndarray", "candle-core", "burn-core"}
FORBIDDEN_DEPENDENCIES = {
    "strata-types": PYTHON_CRATES | TENSOR_CRATES,
    "strata-radix": PYTHON_CRATES | TENSOR_CRATES,
    "strata-tier": PYTHON_CRATES | TENSOR_CRATES,
    "strata-sched": PYTHON_CRATES | TENSOR_CRATES,
    "strata-control": PYTHON_CRATES | TENSOR_CRATES,
    "strata-core": PYTHON_CRATES | TENSOR_CRATES,
    "strata-sim": PYTHON_CRATES | TENSOR_CRATES | {"strata-disk", "strata-copy"},
}


def read_toml(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))


def load_tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dependency_tree(crate: str) -> set[str]:
    """Names of all crates that `crate` is built from, itself included."""
    command = [
        "cargo",
        "tree",
        "--package",
        crate,
        "--edges",
        "normal,build",
        "--prefix",
        "none",
        "--format",
        "{p}",
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert listed.returncode == 0, listed.stderr
    return {line.split()[0] for line in listed.stdout.splitlines() if line}


def third_party_imports() -> tuple[set[str], set[str]]:
    """Top-level names that python/strata imports by statements, and those that it imports by name where they are
    there."""
    by_statement, by_name = set(), set()
    for path in (ROOT / "python/strata").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                by_statement |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                by_statement.add(node.module)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("import_module", "find_spec")
            ):
                by_name |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    own = sys.stdlib_module_names | {"strata"}
    return tuple({name.partition(".")[0] for name in names} - own for names in (by_statement, by_name))


def declared(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_every_third_party_import_is_declared() -> None:
    project = read_toml("pyproject.toml")["project"]
    extras = [line for extra in ("cuda", "plot") for line in project["optional-dependencies"][extra]]
    by_statement, by_name = third_party_imports()
    assert by_statement and by_name
    providers = {
        name: {canonicalize_name(one) for one in distributions}
        for name, distributions in importlib.metadata.packages_distributions().items()
    }
    # Not on every machine: what reads TOML before Python 3.11, and what a GPU needs.
    providers |= {"tomli": {"tomli"}, "cupy": {"cupy-cuda13x"}}
    mandatory = declared(project["dependencies"])
    assert {name for name in by_statement if not providers.get(name, set()) & mandatory} == set()
    optional = mandatory | declared(extras)
    undeclared = {name for name in by_name if not providers.get(name, set()) & optional}
    assert undeclared == ASKED_FOR_BY_NAME


def test_one_version_everywhere() -> None:
    version = read_toml("Cargo.toml")["workspace"]["package"]["version"]
    assert "version" in read_toml("pyproject.toml")["project"]["dynamic"]
    assert importlib.metadata.version("strata-kv") == version
    assert _core.version() == version
    assert strata.__version__ == version


def test_every_crate_takes_its_version_from_the_workspace() -> None:
    own = [
        crate
        for crate in CRATES
        if read_toml(f"rust/{crate}/Cargo.toml")["package"]["version"] != {"workspace": True}
    ]
    assert own == []


def test_the_same_oldest_python_is_promised_to_pip_and_to_the_compiler() -> None:
    requires = read_toml("pyproject.toml")["project"]["requires-python"]
    features = read_toml("Cargo.toml")["workspace"]["dependencies"]["pyo3"]["features"]
    assert requires == ">=3.10"
    assert "abi3-py310" in features
    assert str(_core.__file__).endswith(".abi3.so")


def test_the_command_strata_is_installed_and_loads() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="strata")
    assert callable(script.load())


def test_the_readme_is_the_distribution_s_description() -> None:
    has_readme = (ROOT / "README.md").exists()
    assert read_toml("pyproject.toml")["project"].get("readme") == ("README.md" if has_readme else None)


def test_stub_names_what_the_module_exports() -> None:
    stub = ast.parse((ROOT / "python/strata/_core.pyi").read_text(encoding="utf-8"))
    defined = {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {
        node.target.id
        for node in stub.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {name for name in defined if not name.startswith("_")} == set(_core.__all__)


def test_every_python_folder_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "python/strata").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("crate", [crate for crate in FORBIDDEN_DEPENDENCIES if crate in CRATES])
def test_no_forbidden_dependency(crate: str) -> None:
    tree = dependency_tree(crate)
    assert crate in tree
    assert tree & FORBIDDEN_DEPENDENCIES[crate] == set()


@pytest.mark.parametrize("crate", CRATES)
def test_unsafe_code_is_forbidden_where_it_is_not_needed(crate: str) -> None:
    root = (ROOT / "rust" / crate / "src/lib.rs").read_text(encoding="utf-8")
    assert ("#![forbid(unsafe_code)]" in root) == (crate not in UNSAFE_CRATES)


@pytest.mark.parametrize("document", sorted(path.name for path in ROOT.glob("*.md")))
def test_documents_name_only_commands_that_make_knows(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`make ([a-z][a-z-]*)", text))
    for block in blocks:
        named |= set(re.findall(r"^(?:\$ )?make ([a-z][a-z-]*)", block, re.MULTILINE))
    assert named <= targets


def test_make_help_lists_every_documented_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    documented = re.findall(r"^## ([a-z-]+): ", makefile, re.MULTILINE)
    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert re.findall(r"^  make ([a-z-]+)", shown, re.MULTILINE) == documented
    assert {"serve", "test", "lint", "bench", "bench-compare", "soak", "clean", "help"} <= set(documented)


def test_a_machine_without_rust_is_told_how_to_get_it(tmp_path: Path) -> None:
    command = [sys.executable, "tools/environment.py", str(tmp_path / "environment")]
    without_path = {**os.environ, "PATH": str(tmp_path)}
    result = subprocess.run(
        command, cwd=ROOT, env=without_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 1
    assert "cargo and rustc not found on PATH" in result.stderr
    assert "https://rustup.rs" in result.stderr
    assert not (tmp_path / "environment").exists()


def test_the_size_of_torch_and_the_remedy_are_said_before_the_download(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dependencies = load_tool("dependencies")
    said_before: list[str] = []
    monkeypatch.setattr(dependencies, "install", lambda *_: said_before.append(capsys.readouterr().out))
    monkeypatch.setattr(dependencies.platform, "system", lambda: "Linux")
    dependencies.install_torch(dependencies.Requirement("torch>=2.6"), "")
    assert "4.7 GB" in said_before[0]
    assert "TORCH_INDEX_URL=" in said_before[0]


def test_the_torch_index_goes_to_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    dependencies = load_tool("dependencies")
    calls: list[tuple[list[str], list[str]]] = []
    monkeypatch.setattr(dependencies, "is_met", lambda requirement: requirement.name not in ("torch", "rich"))
    monkeypatch.setattr(
        dependencies,
        "install",
        lambda requirements, options: calls.append(([one.name for one in requirements], options)),
    )
    monkeypatch.setattr(sys, "argv", ["dependencies.py", "--torch-index-url", "https://index.invalid/cpu"])
    dependencies.main()
    assert calls == [(["torch"], ["--index-url", "https://index.invalid/cpu"]), (["rich"], ["--quiet"])]
