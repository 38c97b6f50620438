"""What `strata doctor` says about a GPU, with a stub in CuPy's place and a torch that believes in one."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from stub_cupy import CompileException, StubCupy
from test_cupy_runtime import Kernels, cupy, module  # noqa: F401 - fixtures

from strata.cli import machine_facts
from strata.cli.doctor import OK, UNAVAILABLE, WARNING, Finding, _gpu
from strata.cli.machine_facts import look_for_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cupy: StubCupy) -> StubCupy:  # noqa: F811
    """One device, a torch for it, and no cubins."""
    properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139 << 30)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(machine_facts, "BUILT", tmp_path)
    return cupy


def report() -> Finding:
    return _gpu(look_for_gpu())


def test_a_gpu_that_can_be_used(gpu: StubCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report()
    assert found.status == OK and not found.remedy
    for words in ("NVIDIA H200 (sm_90, 139 GiB)", "driver", "CuPy 14.2.0", "compiled at start (no cubins)"):
        assert words in found.detail
    monkeypatch.setattr(machine_facts.cubins, "built", lambda folder: {"sm_80": "", "sm_90": ""})
    assert "cubins for sm_80, sm_90" in report().detail


def test_kernels_that_cannot_be_had_are_told_with_the_remedy(
    gpu: StubCupy,
    module: Kernels,  # noqa: F811
) -> None:
    module.error = CompileException("no such header")
    found = report()
    assert found.status == WARNING and found.remedy
    for words in ("NVIDIA H200", "--device cuda does not start", "no such header", "make cubins"):
        assert words in found.detail


def test_stale_cubins_are_told_without_a_gpu_too(
    gpu: StubCupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text('{"source": "of before", "cubins": {}}')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = report()
    assert found.status == WARNING and found.remedy == "make cubins" and "another source" in found.detail


def test_no_gpu_is_no_fault(gpu: StubCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = look_for_gpu()
    assert facts.devices == () and facts.cuda_refusal is None, "there is nothing to try"
    assert _gpu(facts).status in (UNAVAILABLE, WARNING) and _gpu(facts).remedy
