"""Models by their hub id, from a hub over HTTP, from its cache, and in words where neither has them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch
from fake_hub import COMMIT, FakeHub, fake_hub
from families import tiny
from gguf_files import TOKENS, byte_level, fields_of
from huggingface_hub import constants

from strata.errors import ModelError
from strata.models import hub as hub_module
from strata.models import load_model, model_name, resolve_model
from strata.models.gguf_tokenizer import build_tokenizer
from strata.models.hub import HubId, parse_hub_id

NAME = "tiny-people/Tiny-Qwen3-0.1M"
DEAD = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lies on a hub: a model, and what nobody needs of it."""
    made = tmp_path_factory.mktemp("hub") / "model"
    tiny("qwen3", vocab_size=len(TOKENS)).save_pretrained(made)
    build_tokenizer(fields_of(byte_level("qwen2"))).save(str(made / "tokenizer.json"))
    for name in ("consolidated.safetensors", "pytorch_model.bin", "README.md", "model.onnx"):
        (made / name).write_bytes(b"not needed")
    return made


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    with fake_hub() as served:
        served.models[NAME] = folder
        yield served


Reach = Callable[[str], None]


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reach:
    """Points the library at a hub and at a cache of the test's own."""

    def point(url: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        download = partial(huggingface_hub.snapshot_download, endpoint=url, cache_dir=tmp_path / "cache")
        monkeypatch.setattr(hub_module, "snapshot_download", download)

    return point


def test_a_model_is_downloaded_once_and_without_what_nobody_reads(hub: FakeHub, reach: Reach) -> None:
    reach(hub.url)
    loaded = load_model(NAME)
    assert loaded.name == NAME == model_name(f"{NAME}@main")
    assert hub.fetched == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert loaded.path.name == COMMIT and loaded.tokenizer.encode("abc")
    theirs = tiny("qwen3", vocab_size=len(TOKENS))
    with torch.inference_mode():
        expected = theirs(torch.tensor([list(range(30))])).logits[0]
    found = loaded.model.reference_forward(list(range(30)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    hub.asked.clear()
    assert resolve_model(f"{NAME}@{COMMIT}") == loaded.path
    assert not hub.fetched


def test_without_a_network_the_cache_serves(hub: FakeHub, reach: Reach) -> None:
    reach(hub.url)
    first = resolve_model(NAME)
    reach(DEAD)
    assert resolve_model(NAME) == resolve_model(f"{NAME}@main") == first


def test_a_connection_that_breaks_off_is_made_again(hub: FakeHub, reach: Reach) -> None:
    reach(hub.url)
    hub.cut_after = 100_000
    assert load_model(NAME).name == NAME
    assert sum(line.startswith("GET") and line.endswith("/model.safetensors") for line in hub.asked) == 2


def test_what_cannot_be_had_is_said_in_words(
    hub: FakeHub, reach: Reach, folder: Path, tmp_path: Path
) -> None:
    reach(hub.url)
    with pytest.raises(ModelError, match=r"some/thing: there is no folder of this name here.*HF_TOKEN"):
        resolve_model("some/thing")
    with pytest.raises(ModelError, match=r"@old: the model has no revision 'old'"):
        resolve_model(f"{NAME}@old")
    hub.gated.add(NAME)
    with pytest.raises(ModelError, match=rf"is gated: accept its terms at {hub.url}/{NAME}.*HF_TOKEN"):
        resolve_model(NAME)
    hub.models["other/format"] = tmp_path / "other"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"other/format: .* has no config\.json"):
        resolve_model("other/format")
    reach(DEAD)
    with pytest.raises(ModelError, match=rf"some/thing: .*the hub {DEAD} cannot be reached.*does not hold"):
        resolve_model("some/thing")


def test_a_folder_here_comes_before_the_hub(
    hub: FakeHub, reach: Reach, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(hub.url)
    shutil.copytree(folder, tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(NAME) == Path(NAME)
    assert model_name(NAME) == "Tiny-Qwen3-0.1M" and not hub.asked


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("Qwen/Qwen2.5-0.5B-Instruct@main", HubId("Qwen/Qwen2.5-0.5B-Instruct", "main")),
        ("org/name@refs/pr/3", HubId("org/name", "refs/pr/3")),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("~/models/name", None),
        ("org/name/more", None),
        ("org/name.gguf", None),
        ("org/name@", None),
        ("../name", None),
    ],
)
def test_what_may_be_a_hub_id(name: str, expected: HubId | None) -> None:
    assert parse_hub_id(name) == expected


def test_a_path_that_is_not_there_is_no_hub_id() -> None:
    with pytest.raises(
        ModelError, match=r"'\./nowhere' is neither 'default', a folder, a \.gguf file nor a name"
    ):
        resolve_model("./nowhere")


def test_the_environment_means_what_it_means_everywhere(hub: FakeHub, tmp_path: Path) -> None:
    """Over the command line: the hub, the token, the cache, and no network at all."""
    hub.gated.add(NAME)
    command = [sys.executable, "-m", "strata.cli.fetch_model", "--model", NAME]

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": hub.token, **more}
        return subprocess.run(
            command, env={**os.environ, **own}, capture_output=True, text=True, timeout=120, check=False
        )

    right = run()
    assert right.returncode == 0, right.stderr
    path = Path(right.stdout.strip())
    assert path.is_relative_to(tmp_path / "home") and (path / "model.safetensors").is_file()
    hub.asked.clear()
    offline = run(HF_HUB_OFFLINE="1")
    assert offline.stdout == right.stdout and not hub.asked
