"""The kernels on a GPU move exactly the bytes that numpy says: the cases that the CPU's build of them passes too."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from case_on_device import on_device
from hypothesis import HealthCheck, given, settings
from test_kernels import SHAPES, cases
from transfer_case import Bytes, Case

from strata.device.cpu_kernels import CpuKernels
from strata.device.kernels import BACKUP_BLOCKS, KINDS, LOAD_BLOCKS, Layout, load_module, word_bytes


class CupyAccelerator:
    """`Accelerator` over CuPy."""

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._module = load_module()
        self._kept: list[Any] = []

    def upload(self, array: npt.NDArray[Any], pinned: bool) -> int:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if pinned:
            memory = self._cupy.cuda.alloc_pinned_memory(max(1, flat.nbytes))
            np.frombuffer(memory, np.uint8, flat.nbytes)[:] = flat
            self._kept.append(memory)
            return int(memory.ptr)
        on_device = self._cupy.asarray(flat) if flat.nbytes else self._cupy.empty(1, np.uint8)
        self._kept.append(on_device)
        return int(on_device.data.ptr)

    def download(self, address: int, size_bytes: int) -> Bytes:
        self._cupy.cuda.Device().synchronize()
        found = np.empty(size_bytes, np.uint8)
        self._cupy.cuda.runtime.memcpy(found.ctypes.data, address, size_bytes, 4)
        return found

    def launch(self, name: str, blocks: int, threads: int, arguments: tuple[npt.NDArray[np.void]]) -> None:
        self._module.get_function(name)((blocks,), (threads,), arguments)

    def forget(self) -> None:
        """Gives back what cases have left."""
        self._kept.clear()


class PlainAccelerator:
    """`Accelerator` over plain memory and the CPU's build: what proves `DeviceCase` itself."""

    def __init__(self, folder: Path) -> None:
        self._kernels = CpuKernels.build(folder)
        self._kept: dict[int, Bytes] = {}

    def upload(self, array: npt.NDArray[Any], pinned: bool) -> int:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        memory = np.zeros(flat.nbytes + 32, np.uint8)
        start = -memory.ctypes.data % 16
        memory[start : start + flat.nbytes] = flat
        address = int(memory.ctypes.data) + start
        self._kept[address] = memory[start:]
        return address

    def download(self, address: int, size_bytes: int) -> Bytes:
        return self._kept[address][:size_bytes].copy()

    def launch(self, name: str, blocks: int, threads: int, arguments: tuple[npt.NDArray[np.void]]) -> None:
        self._kernels.launch(name, blocks, arguments, threads=threads)


@pytest.fixture(scope="module")
def gpu() -> CupyAccelerator:
    return CupyAccelerator()


@pytest.fixture(autouse=True)
def forget(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "gpu" in request.fixturenames:
        request.getfixturevalue("gpu").forget()


@pytest.mark.gpu
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(case=cases())
def test_any_layout(gpu: CupyAccelerator, case: Case) -> None:
    assert on_device(case).defects(gpu) == []
    gpu.forget()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_models_between_pool_and_arena(gpu: CupyAccelerator, shape: str, kind: Any) -> None:
    parts, page_size, token_bytes = SHAPES[shape]
    piece, layers, pools = page_size * token_bytes, 3, (7, 6)
    device = Layout.layer_first(layers, parts, pools[0], piece)
    host = Layout.page_first(layers, parts, piece, 4096)
    width = word_bytes(4096, 4096, device, host)
    for bits, blocks in itertools.product((32, 64), (LOAD_BLOCKS, BACKUP_BLOCKS)):
        pages = ((6, 0, 3, 2), (1, 5, 0, 2))
        case = Case(
            kind,
            layers,
            parts,
            device,
            host,
            *pages,
            pools,
            word=width,
            index_bits=bits,
            layer=1,
            blocks=blocks,
        )  # type: ignore[arg-type]
        assert on_device(case).defects(gpu) == []


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 31, 32])
def test_any_quota_moves_everything(gpu: CupyAccelerator, blocks: int) -> None:
    device, host = Layout.layer_first(2, 2, 41, 1168), Layout.page_first(2, 2, 1168, 64)
    pages = tuple(range(37))
    case = Case("load_all", 2, 2, device, host, pages, pages[::-1], (41, 37), word=16, blocks=blocks)
    assert on_device(case).defects(gpu) == []


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_the_cases_are_the_cpus_own(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    """What runs on a GPU elsewhere, over plain memory: nothing is wrong, and a wrong byte is seen."""
    plain = _plain(tmp_path_factory)
    assert on_device(case).defects(plain) == []
    if case.device_pages:
        assert on_device(case).defects(_Forgetful(plain)) != []


_BUILT: list[PlainAccelerator] = []


def _plain(factory: pytest.TempPathFactory) -> PlainAccelerator:
    if not _BUILT:
        _BUILT.append(PlainAccelerator(factory.mktemp("kernels")))
    return _BUILT[0]


class _Forgetful:
    """Launches nothing."""

    def __init__(self, plain: PlainAccelerator) -> None:
        self.upload, self.download = plain.upload, plain.download

    def launch(self, *arguments: object) -> None:
        """Nothing moves."""
