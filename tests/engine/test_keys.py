"""Page keys are equal in every process, and are what the format says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from strata._core import page_keys

TOKENS = [(index * index + 7) % 50000 for index in range(70)]
CHILD = """
import json, sys
import numpy as np
from strata._core import page_keys
tokens = np.array(json.loads(sys.argv[1]), dtype=np.uint32)
print(hash("strata"))
print(json.dumps([page_keys(tokens, size, salt=salt) for size in (1, 16) for salt in ("", "tenant")]))
"""


def digest(kind: str, *fields: tuple[str, bytes]) -> bytes:
    """BLAKE3 over tagged, length-framed fields, written down again from the format's description."""
    framed = b"".join(
        len(part).to_bytes(8, "little") + part
        for tag, value in (("strata", kind.encode()), *fields)
        for part in (tag.encode(), value)
    )
    return bytes(blake3(framed).digest())


def expected_keys(tokens: list[int], page_size: int, salt: str) -> list[str]:
    namespace = digest("namespace", ("salt", salt.encode()), ("adapter", b""))
    parent = digest("root", ("namespace", namespace), ("group", (0).to_bytes(2, "little")))
    keys = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = np.array(tokens[start : start + page_size], dtype="<u4").tobytes()
        parent = digest("page", ("parent", parent), ("tokens", page))
        keys.append(parent.hex())
    return keys


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 17), st.text(max_size=5))
def test_keys_equal_an_independent_computation(tokens: list[int], page_size: int, salt: str) -> None:
    keys = page_keys(np.array(tokens, dtype=np.uint32), page_size, salt=salt)
    assert keys == expected_keys(tokens, page_size, salt)


def test_keys_are_equal_under_two_hash_seeds() -> None:
    printed = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(TOKENS)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        printed.append(done.stdout.splitlines())
    (one_hash, one), (other_hash, other) = printed
    assert one_hash != other_hash, "the seeds did not differ: this test would prove nothing"
    assert one == other
    expected = [expected_keys(TOKENS, size, salt) for size in (1, 16) for salt in ("", "tenant")]
    assert json.loads(one) == expected
