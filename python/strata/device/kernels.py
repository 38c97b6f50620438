"""The transfer kernels of `cuda/` as Python sees them: names, layouts, and the one argument that each takes.

Needs no GPU and no CuPy until `load_module` is called. `cuda/transfer.h` states what the kernels promise.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from strata.device import cubins
from strata.device.kernel_source import BUILT, kernel_source
from strata.errors import ConfigError

Kind = Literal["load_layer", "load_all", "back_up_all"]
WordBytes = Literal[4, 8, 16]
IndexBits = Literal[32, 64]
KINDS: tuple[Kind, ...] = get_args(Kind)

THREADS = 1024  # of a block, as the kernels' launch bounds say
LOAD_BLOCKS = 2  # processors that a load may occupy: what fills a link
BACKUP_BLOCKS = 1  # a backup has time

MAX_PIECE_BYTES = 1 << 32  # the kernels count a piece's words in 32 bits

_LAYOUT = np.dtype((np.uint64, 5))
_SIDE = np.dtype([("memory", np.uint64), ("pages", np.uint64), ("layout", _LAYOUT)])
# strata_transfer of cuda/transfer.h, byte for byte
TRANSFER = np.dtype(
    [
        ("source", _SIDE),
        ("destination", _SIDE),
        ("count", np.uint32),
        ("parts", np.uint32),
        ("layers", np.uint32),
        ("first_layer", np.uint32),
    ]
)


@dataclass(frozen=True)
class Layout:
    """Where the pieces of a pool lie, in bytes from the start of its memory: `strata_layout` of `cuda/address.h`."""

    base: int
    layer_stride: int
    part_stride: int
    page_stride: int
    piece_bytes: int

    @classmethod
    def layer_first(cls, layers: int, parts: int, pages: int, piece_bytes: int) -> Layout:
        """The device's layout, `[layer][part][page][piece]`, without gaps."""
        _check_shape(layers=layers, parts=parts, pages=pages, piece_bytes=piece_bytes)
        return cls(0, parts * pages * piece_bytes, pages * piece_bytes, piece_bytes, piece_bytes)

    @classmethod
    def page_first(cls, layers: int, parts: int, piece_bytes: int, alignment: int = 1) -> Layout:
        """The host's layout, `[page][layer][part][piece]`, each page at a multiple of `alignment` bytes."""
        _check_shape(layers=layers, parts=parts, piece_bytes=piece_bytes, alignment=alignment)
        page_stride = math.ceil(layers * parts * piece_bytes / alignment) * alignment
        return cls(0, parts * piece_bytes, piece_bytes, page_stride, piece_bytes)

    def words(self) -> npt.NDArray[np.uint64]:
        """uint64[5], in the order of `strata_layout`."""
        return np.array(astuple(self), dtype=np.uint64)


def _check_shape(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"a layout needs {name} of at least 1, got {size}")


def kernel_name(kind: Kind, word_bytes: WordBytes, index_bits: IndexBits) -> str:
    """The name of the kernel in the module: what it does, its words' width, the width of the page ids it reads."""
    return f"strata_{kind}_w{word_bytes}_i{index_bits}"


def kernel_names() -> list[str]:
    """All kernels of the module."""
    return [
        kernel_name(kind, word, index)
        for kind in KINDS
        for word in get_args(WordBytes)
        for index in get_args(IndexBits)
    ]


def word_bytes(
    device_address: int, host_address: int, device_layout: Layout, host_layout: Layout
) -> WordBytes:
    """The widest word that every address, stride and piece of both sides is a multiple of. Raises ConfigError where
    not even 4 bytes divide them."""
    numbers = [device_address, host_address, *astuple(device_layout), *astuple(host_layout)]
    common = math.gcd(*numbers)
    widths: tuple[WordBytes, ...] = (16, 8, 4)
    for width in widths:
        if common % width == 0:
            return width
    raise ConfigError(
        f"GPU copies move words of 4 bytes, but {common} is all that divides addresses {device_address:#x} and"
        f" {host_address:#x}, {device_layout} and {host_layout}: choose another --page-size or dtype"
    )


def arguments(
    kind: Kind,
    device_address: int,
    host_address: int,
    device_layout: Layout,
    host_layout: Layout,
    device_pages_address: int,
    host_pages_address: int,
    count: int,
    layer: int,
    parts: int,
    layers: int,
) -> tuple[npt.NDArray[np.void]]:
    """The kernel's arguments: one `strata_transfer`, an array of one element, which CuPy passes by value.

    The two page tables hold `count` page ids each, in one order; the kernel reads them from these addresses while it
    runs. `load_layer` moves `layer` alone; the others move `layers` layers from the first on. Raises ConfigError for
    sizes that no kernel takes.
    """
    if device_layout.piece_bytes != host_layout.piece_bytes:
        raise ConfigError(
            f"both sides of a copy need one piece size, got {device_layout.piece_bytes} and {host_layout.piece_bytes}"
        )
    if not 4 <= device_layout.piece_bytes <= MAX_PIECE_BYTES:
        raise ConfigError(
            f"a piece has 4 bytes to 4 GiB, got {device_layout.piece_bytes} bytes: see --page-size"
        )
    if count < 0 or parts < 1 or layers < 1 or not 0 <= layer < layers:
        raise ConfigError(f"no copy of layer {layer} of {layers}, {parts} parts, {count} pages")
    device = (device_address, device_pages_address, astuple(device_layout))
    host = (host_address, host_pages_address, astuple(host_layout))
    source, destination = (device, host) if kind == "back_up_all" else (host, device)
    first, moved = (layer, 1) if kind == "load_layer" else (0, layers)
    return (np.array([(source, destination, count, parts, moved, first)], dtype=TRANSFER),)


def load_module() -> Any:
    """The kernels for the current CUDA device, as a `cupy.RawModule`: from the cubin that `make cubins` built for
    its compute capability, else compiled by NVRTC (or HIPRTC) at first use. `get_function(kernel_name(...))` gives one.

    Raises ConfigError where CuPy is missing or the cubins are stale.
    """
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigError(
            f"--device cuda needs CuPy ({error}): install the extra `cuda` (EXTRAS=cuda with make), or serve with"
            " --device cpu"
        ) from error
    if not cupy.cuda.runtime.is_hip:
        capability = str(cupy.cuda.Device().compute_capability)
        cubin = cubins.cubin_for(int(capability[:-1]), int(capability[-1:]), BUILT)
        if cubin is not None:
            return cupy.RawModule(path=str(cubin))
    return cupy.RawModule(code=kernel_source(), options=cubins.COMPILE_OPTIONS)
