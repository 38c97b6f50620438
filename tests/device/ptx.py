"""What the PTX of a kernel does to memory: each access, its width and hints, and the pointer that it starts from.

Addresses are traced from the fields of `strata_transfer` through the arithmetic to the accesses; a page id that was
read from a table starts afresh. An access whose address comes from no pointer, or from two, is a defect too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from strata.device.kernels import TRANSFER

STREAMING = {"cs", "L1::no_allocate", "L1::evict_first"}
# State spaces of loads and stores that are no traffic of the copy
NOT_MEMORY = {"param", "const"}

_ENTRY = re.compile(r"\.entry\s+(\w+)\((.*?)\)(.*?)\n\}", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@!?%\w+\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*);")
_REGISTER = re.compile(r"%\w+")
_LABEL = re.compile(r"(\$\w+):")


def pointers() -> dict[int, str]:
    """Offset in the argument -> the pointer that lies there, by the fields' names."""
    found = {}
    for side in ("source", "destination"):
        dtype, offset = TRANSFER.fields[side][:2]  # type: ignore[index]
        for name in ("memory", "pages"):
            found[offset + dtype.fields[name][1]] = f"{side}.{name}"
    return found


@dataclass(frozen=True)
class Instruction:
    """`operands` as written; `qualifiers` without dots: global, cs, v4, u32."""

    operation: str
    qualifiers: tuple[str, ...]
    operands: str

    def registers(self) -> tuple[list[str], list[str]]:
        """(written, read). A store and a branch write none; a load reads those of its address."""
        if self.operation in ("st", "bra", "red", "ret"):
            return [], _REGISTER.findall(self.operands)
        first, _, rest = (
            self.operands.partition("}") if self.operands.startswith("{") else self.operands.partition(",")
        )
        return _REGISTER.findall(first), _REGISTER.findall(rest)

    def bytes_wide(self) -> int:
        """Bytes that one thread moves."""
        vector = next((int(one[1:]) for one in self.qualifiers if re.fullmatch(r"v[248]", one)), 1)
        return vector * int(re.sub(r"\D", "", self.qualifiers[-1])) // 8


@dataclass(frozen=True)
class Access:
    """A load or store. `pointer` is a name of `pointers()`, or says what the address is instead."""

    instruction: Instruction
    pointer: str
    in_loop: bool

    def is_table(self) -> bool:
        return self.pointer.endswith(".pages")


@dataclass(frozen=True)
class Kernel:
    """One entry point."""

    name: str
    accesses: tuple[Access, ...]

    def defects(self, word: int, index: int, in_flight: int) -> list[str]:
        """Everything that a copy of `word` bytes with page ids of `index` bytes has no business to do."""
        found = []
        for access in self.accesses:
            what = ".".join((access.instruction.operation, *access.instruction.qualifiers))
            if problem := _problem(access, word, index):
                found.append(f"{self.name}: {what} {access.instruction.operands}: {problem}")
        moves = [
            access.instruction.operation
            for access in self.accesses
            if access.in_loop and not access.is_table()
        ]
        if moves != ["ld"] * in_flight + ["st"] * in_flight:
            found.append(
                f"{self.name}: its loop does {moves}, not {in_flight} loads before {in_flight} stores"
            )
        return found


def _problem(access: Access, word: int, index: int) -> str | None:
    instruction = access.instruction
    wide, qualifiers = instruction.bytes_wide(), set(instruction.qualifiers)
    if "global" not in qualifiers:
        return "not to global memory"
    if access.is_table():
        expected = instruction.operation == "ld" and "nc" in qualifiers and wide == index
        return None if expected else f"no read-only load of a page id of {index} bytes"
    side = "source" if instruction.operation == "ld" else "destination"
    if access.pointer != f"{side}.memory":
        return f"its address comes from {access.pointer}"
    if wide != word:
        return f"{wide} bytes wide instead of {word}"
    return None if qualifiers & STREAMING else "no hint for the caches"


def kernels_of(ptx: str) -> dict[str, Kernel]:
    """The entry points of a PTX module, by name."""
    return {name: _kernel(name, body) for name, _, body in _ENTRY.findall(ptx)}


def _kernel(name: str, body: str) -> Kernel:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif match := _INSTRUCTION.fullmatch(line.strip()):
            qualifiers = tuple(one for one in match[2].split(".") if one)
            instructions.append(Instruction(match[1], qualifiers, match[3]))
        elif line.strip().endswith(";") and not line.strip().startswith("."):
            raise ValueError(f"{name}: what does {line.strip()!r} do?")
    looping: set[int] = set()
    for position, one in enumerate(instructions):
        if one.operation == "bra" and (start := labels.get(one.operands.strip(), position + 1)) <= position:
            looping.update(range(start, position + 1))
    origins = _origins(instructions)
    accesses = []
    for position, one in enumerate(instructions):
        if one.operation in ("ld", "ldu", "st", "atom", "red") and not set(one.qualifiers) & NOT_MEMORY:
            address = _REGISTER.findall(one.operands[one.operands.index("[") :].split("]")[0])
            sources = set().union(*(origins.get(register, set()) for register in address))
            accesses.append(Access(one, " and ".join(sorted(sources)) or "nowhere", position in looping))
    return Kernel(name, tuple(accesses))


def _origins(instructions: list[Instruction]) -> dict[str, set[str]]:
    """Register -> the pointers that its value is reckoned from, over all paths."""
    names = pointers()
    origins: dict[str, set[str]] = {}
    changed = True
    while changed:
        changed = False
        for one in instructions:
            written, read = one.registers()
            if one.operation in ("ld", "ldu", "atom"):
                new = _loaded(one, len(written), names)
            else:
                new = [set().union(*(origins.get(register, set()) for register in read))] * len(written)
            for register, sources in zip(written, new, strict=True):
                if not sources <= origins.get(register, set()):
                    origins[register] = origins.get(register, set()) | sources
                    changed = True
    return origins


def _loaded(load: Instruction, registers: int, names: dict[int, str]) -> list[set[str]]:
    """For each register of a load, the pointer that it holds then: only the kernel's argument has pointers."""
    argument = re.search(r"_param_0(?:\+(\d+))?\]", load.operands)
    if argument is None:
        return [set()] * registers
    start, width = int(argument[1] or 0), load.bytes_wide() // registers
    offsets = [start + width * number for number in range(registers)]
    return [{names[offset]} if offset in names else set() for offset in offsets]
