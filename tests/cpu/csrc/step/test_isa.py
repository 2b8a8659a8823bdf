"""The instruction set found by cpuid against the kernel's list of flags."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from hetero_llm.core.errors import ConfigError
from hetero_llm.cpu import native

FLAGS_OF_LEVEL = (
    (),
    ("avx2", "fma", "f16c"),
    ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    ("avx512_bf16",),
    ("amx_tile", "amx_bf16", "amx_int8"),
)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    loaded = native.load()
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    pytest.skip("the kernel lists no flags here")


def test_best_level_is_the_highest_whose_flags_are_all_there(
    library: ctypes.CDLL, flags: set[str]
) -> None:
    best = 0
    while best + 1 < len(FLAGS_OF_LEVEL) and flags.issuperset(FLAGS_OF_LEVEL[best + 1]):
        best += 1
    assert library.hetero_isa_best() == best
    assert library.hetero_isa_vnni() == (best >= 2 and "avx512_vnni" in flags)


def test_a_lower_level_can_be_forced(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETERO_LLM_CPU_ISA", raising=False)
    best = native.isa_level()
    assert best == library.hetero_isa_best()
    for level, name in enumerate(native.ISA_NAMES):
        monkeypatch.setenv("HETERO_LLM_CPU_ISA", name)
        if level <= best:
            assert native.isa_level() == level
        else:
            with pytest.raises(ConfigError, match=f"HETERO_LLM_CPU_ISA='{name}': this machine has"):
                native.isa_level()


@pytest.mark.parametrize("name", ["sse", "AVX2", "2"])
def test_an_unknown_level_is_an_error(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HETERO_LLM_CPU_ISA", name)
    with pytest.raises(ConfigError, match=f"HETERO_LLM_CPU_ISA='{name}': must be one of base, "):
        native.isa_level(library)
