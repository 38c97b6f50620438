"""The kernels compile for GPUs without one, what comes of it is what `cuda/` promises, and stale files are refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import ptx
import pytest

import nvrtc
from build_cubins import build
from strata.device import cubins, kernel_source, kernels
from strata.device.cubins import ARCHITECTURES, COMPILE_OPTIONS, MANIFEST, cubin_for, cubin_path
from strata.device.kernel_source import ENTRY, bundle
from strata.device.kernels import kernel_name, kernel_names, load_module
from strata.errors import ConfigError

Modules = dict[str, nvrtc.Compiled]


@pytest.fixture(scope="module")
def compiler() -> nvrtc.Nvrtc:
    if not nvrtc.is_installed() and "CI" not in os.environ:
        pytest.skip(f"{nvrtc.REQUIREMENT} could not be installed; `make cubins` tries again")
    return nvrtc.Nvrtc()


@pytest.fixture(scope="module")
def modules(compiler: nvrtc.Nvrtc) -> Modules:
    """Architecture -> the kernels for it."""
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda name: compiler.compile(bundle(), name, COMPILE_OPTIONS), ARCHITECTURES)
        return dict(zip(ARCHITECTURES, compiled, strict=True))


def widths(name: str) -> tuple[int, int]:
    """Bytes of a word and of a page id, by a kernel's name."""
    match = re.fullmatch(r"strata_\w+_w(\d+)_i(\d+)", name)
    assert match is not None
    return int(match[1]), int(match[2]) // 8


def words_in_flight() -> int:
    match = re.search(r"#define STRATA_WORDS_IN_FLIGHT (\d+)", bundle())
    assert match is not None
    return int(match[1])


def test_the_compiler_is_of_the_oldest_driver_we_serve(compiler: nvrtc.Nvrtc) -> None:
    """Drivers of CUDA 13.0 refuse PTX of newer compilers."""
    assert compiler.version() == (13, 0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_is_in_the_cubin(modules: Modules, architecture: str) -> None:
    cubin = modules[architecture].cubin
    assert cubin[:4] == b"\x7fELF"
    assert set(re.findall(rb"\.text\.(\w+)", cubin)) == {name.encode() for name in kernel_names()}
    assert f".target {architecture}\n" in modules[architecture].ptx


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_block_of_1024_threads_fits_and_no_register_spills(modules: Modules, architecture: str) -> None:
    """More than 64 registers a thread and the launch fails; a spill is traffic of its own."""
    log = modules[architecture].log
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    spilled = re.findall(r"(\d+) bytes spill", log)
    assert len(registers) == len(kernel_names()) and max(registers) <= 65536 // kernels.THREADS
    assert len(spilled) == 2 * len(kernel_names()) and set(spilled) == {"0"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_kernel_moves_words_of_its_width_past_the_caches(modules: Modules, architecture: str) -> None:
    """All accesses to pages, in the copy loop and behind it: 16 bytes wide for the aligned kernels, streaming, read
    from the source, written to the destination, all reads of a batch ahead of its writes. Beside them only page ids
    are read, through the read-only cache."""
    found = ptx.kernels_of(modules[architecture].ptx)
    assert sorted(found) == sorted(kernel_names())
    defects = [defect for name in found for defect in found[name].defects(*widths(name), words_in_flight())]
    assert defects == []


def test_the_aligned_kernels_copy_loop(modules: Modules) -> None:
    """The same, spelled out for one kernel, so that a reader sees what is being checked."""
    kernel = ptx.kernels_of(modules["sm_90"].ptx)[kernel_name("load_layer", 16, 32)]
    pages = [access.instruction for access in kernel.accesses if access.in_loop and not access.is_table()]
    spelled = [".".join((one.operation, *one.qualifiers)) for one in pages]
    assert spelled == ["ld.global.cs.v4.u32"] * 6 + ["st.global.cs.v4.u32"] * 6


FIND = "strata_find<Word, Index>(transfer.destination, transfer.first_layer, place)"
# What the source says, what the mutant says instead, and what must be said about it
MUTANTS = {
    "words of 8 bytes": (
        "typedef uint4 strata_word16",
        "typedef uint2 strata_word16",
        "8 bytes wide instead of 16",
    ),
    "loads without a hint": ("__ldcs(address)", "__ldg(address)", "no hint for the caches"),
    "loads that the caches keep": ("__ldcs(address)", "__ldca(address)", "no hint for the caches"),
    "stores without a hint": (
        "__stcs(address, word)",
        "(*(address) = (word))",
        "not to global memory",
    ),
    "stores that the caches keep": (
        "__stcs(address, word)",
        "__stwb(address, word)",
        "no hint for the caches",
    ),
    "each word written before the next is read": (
        f"to[slot] = {FIND};",
        f"STRATA_WRITE_ONCE(({FIND}), words[slot]); to[slot] = 0;",
        "not 6 loads before 6 stores",
    ),
    "written where it was read": (
        "to[slot] = strata_find<Word, Index>(transfer.destination",
        "to[slot] = strata_find<Word, Index>(transfer.source",
        "its address comes from source.memory",
    ),
    "page ids of 8 bytes throughout": (
        "(const Index *)side.pages",
        "(const strata_u64 *)side.pages",
        "no read-only load of a page id of 4 bytes",
    ),
    "page ids past the read-only cache": (
        "#define STRATA_READ_SHARED(address) __ldg(address)\n\n#else",
        "#define STRATA_READ_SHARED(address) __ldcs(address)\n\n#else",
        "no read-only load of a page id of 4 bytes",
    ),
}


def one_width(source: str) -> str:
    """`source` with the kernels of 16-byte words and 32-bit page ids alone: they compile in a sixth of the time."""
    return re.sub(r"^STRATA_KERNELS\((?!16, 32)\d+, \d+\)$", "", source, flags=re.MULTILINE)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found_in_the_ptx(compiler: nvrtc.Nvrtc, name: str) -> None:
    says, instead, expected = MUTANTS[name]
    source = bundle()
    assert source.count(says) == 1, "the mutant no longer fits the source"
    mutant = compiler.compile(one_width(source.replace(says, instead)), "sm_90", COMPILE_OPTIONS)
    kernel = ptx.kernels_of(mutant.ptx)[kernel_name("load_all", 16, 32)]
    assert expected in "\n".join(kernel.defects(16, 4, words_in_flight()))


def test_a_spill_is_seen(compiler: nvrtc.Nvrtc) -> None:
    log = compiler.compile(one_width(bundle()), "sm_90", (*COMPILE_OPTIONS, "-DSTRATA_WORDS_IN_FLIGHT=8")).log
    assert set(re.findall(r"(\d+) bytes spill", log)) != {"0"}


@pytest.mark.parametrize(("words", "spills"), [(1, False), (2, True)])
def test_half_a_multiprocessor_is_enough_for_one_word_in_flight(
    compiler: nvrtc.Nvrtc, words: int, spills: bool
) -> None:
    """Why a block takes a whole one."""
    bounds = "__launch_bounds__(STRATA_THREADS)"
    source = one_width(bundle())
    assert source.count(bounds) == 1
    source = source.replace(bounds, "__launch_bounds__(STRATA_THREADS, 2)")
    log = compiler.compile(source, "sm_90", (*COMPILE_OPTIONS, f"-DSTRATA_WORDS_IN_FLIGHT={words}")).log
    assert set(re.findall(r"Used (\d+) registers", log)) == {"32"}
    assert (set(re.findall(r"(\d+) bytes spill", log)) != {"0"}) is spills


def test_source_that_nvrtc_refuses_shows_its_words(compiler: nvrtc.Nvrtc) -> None:
    with pytest.raises(nvrtc.NvrtcError, match=r"refuses the kernels for sm_90:\n.*error: this declaration"):
        compiler.compile("nonsense", "sm_90")


@pytest.fixture
def built(compiler: nvrtc.Nvrtc, modules: Modules, tmp_path: Path) -> Path:
    """A folder as `make cubins` leaves it."""
    done = SimpleNamespace(compile=lambda source, name, options: modules[name])
    folder = tmp_path / "cubins"
    (folder / "old").mkdir(parents=True)
    build(folder, bundle(), done)  # type: ignore[arg-type]
    return folder


def test_what_make_cubins_leaves(built: Path, modules: Modules) -> None:
    files = {path.name for path in built.iterdir()}
    assert files == {MANIFEST, ENTRY, *(cubin_path(name, built).name for name in ARCHITECTURES)}
    manifest = json.loads((built / MANIFEST).read_text())
    assert manifest["nvrtc"] == nvrtc.VERSION
    assert manifest["source"] == hashlib.sha256((built / ENTRY).read_bytes()).hexdigest()
    assert cubin_path("sm_90", built).read_bytes() == modules["sm_90"].cubin


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((7, 5), None),
        ((12, 0), None),
    ],
)
def test_a_device_gets_the_cubin_that_it_runs(
    built: Path, capability: tuple[int, int], architecture: str | None
) -> None:
    wanted = None if architecture is None else cubin_path(architecture, built)
    assert cubin_for(*capability, built) == wanted


def test_of_two_cubins_that_run_the_newer_one_is_taken(built: Path) -> None:
    manifest = json.loads((built / MANIFEST).read_text())
    manifest["cubins"] = {"sm_80": "", "sm_86": hashlib.sha256(b"newer").hexdigest(), "sm_89": ""}
    (built / MANIFEST).write_text(json.dumps(manifest))
    cubin_path("sm_86", built).write_bytes(b"newer")
    assert cubin_for(8, 7, built) == cubin_path("sm_86", built)


def test_without_cubins_there_is_none_for_any_device(tmp_path: Path) -> None:
    assert cubin_for(9, 0, tmp_path / "none") is None


def test_cubins_of_another_source_are_refused(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubins, "kernel_source", lambda: bundle() + "// changed since\n")
    with pytest.raises(ConfigError, match=r"built from another source than this one.*`make cubins`"):
        cubin_for(9, 0, built)


def test_a_cubin_that_was_changed_is_refused(built: Path) -> None:
    cubin_path("sm_90", built).write_bytes(b"\x7fELF and something else")
    with pytest.raises(
        ConfigError, match=r"sm_90.cubin is not the file that manifest.json describes.*make cubins"
    ):
        cubin_for(9, 0, built)
    assert cubin_for(8, 0, built) == cubin_path("sm_80", built)


def test_a_cubin_that_is_missing_is_named(built: Path) -> None:
    cubin_path("sm_90", built).unlink()
    with pytest.raises(ConfigError, match=r"transfer.sm_90.cubin cannot be read.*make cubins"):
        cubin_for(9, 0, built)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"source": "x", "cubins": 3}'])
def test_a_manifest_that_is_none_is_refused(built: Path, text: str) -> None:
    (built / MANIFEST).write_text(text)
    with pytest.raises(ConfigError, match=r"is not a manifest of cubins.*make cubins"):
        cubin_for(9, 0, built)


class FakeCupy:
    """Records what `cupy.RawModule` is asked for on a device of one compute capability."""

    def __init__(self, capability: str, is_hip: bool = False) -> None:
        self.asked: list[dict[str, object]] = []
        device = SimpleNamespace(compute_capability=capability)
        self.cuda = SimpleNamespace(Device=lambda: device, runtime=SimpleNamespace(is_hip=is_hip))

    def RawModule(self, **asked: object) -> str:
        self.asked.append(asked)
        return "module"


def use(monkeypatch: pytest.MonkeyPatch, cupy: FakeCupy, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(kernels, "BUILT", folder)


@pytest.mark.parametrize(
    ("capability", "architecture"), [("90", "sm_90"), ("86", "sm_80"), ("103", "sm_100")]
)
def test_the_module_comes_from_the_cubin(
    built: Path, monkeypatch: pytest.MonkeyPatch, capability: str, architecture: str
) -> None:
    cupy = FakeCupy(capability)
    use(monkeypatch, cupy, built)
    assert load_module() == "module"
    assert cupy.asked == [{"path": str(cubin_path(architecture, built))}]


def test_the_module_is_compiled_where_no_cubin_fits(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfit = [
        (FakeCupy("120"), built),
        (FakeCupy("90a", is_hip=True), built),
        (FakeCupy("90"), tmp_path / "none"),
    ]
    for cupy, folder in unfit:
        use(monkeypatch, cupy, folder)
        assert load_module() == "module"
        assert cupy.asked == [{"code": bundle(), "options": COMPILE_OPTIONS}]


def test_a_missing_cupy_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"--device cuda needs CuPy.*EXTRAS=cuda"):
        load_module()


def test_importing_strata_imports_no_cupy(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise SystemExit('cupy was imported')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "import strata.serve, strata.device.kernels, strata.device.cpu_kernels"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_installed_package_has_the_source_that_it_was_built_with(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_source, "CHECKOUT_SOURCES", built / "no checkout")
    monkeypatch.setattr(kernel_source, "BUILT", built)
    assert kernel_source.kernel_source() == (built / ENTRY).read_text()
    (built / ENTRY).unlink()
    with pytest.raises(ConfigError, match=r"holds no GPU kernels.*make cubins"):
        kernel_source.kernel_source()
