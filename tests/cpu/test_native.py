"""Building and loading the CPU library, on a small library of its own."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_llm.cpu import build, native
from hetero_llm.utils import cache_folder
from hetero_llm.utils.env import cache_dir
from hetero_llm.utils.native_build import Recipe

OUTER = (
    '#include "part.h"\n#include "deeper/part.h"\nextern "C" int hetero_isa_best() { return 0; }\n'
)
INNER = '#include "part.h"\nint inner() { return kPart; }\n'
ELF_MACHINE = 18  # offset of the architecture in an ELF header


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A library of two small files in place of ours, and an empty cache."""
    folder = tmp_path / "csrc"
    for name, text in {
        "one.cpp": OUTER,
        "part.h": "constexpr int kOuter = 1;\n",
        "deeper/one.cpp": INNER,
        "deeper/part.h": "constexpr int kPart = 2;\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    recipe = native.recipe

    def flags_of(source: Path) -> tuple[str, ...]:
        return ("-fopenmp",) if source.parent == folder else ()

    def small(*, sanitize: bool = False) -> Recipe:
        return replace(recipe(sanitize=sanitize), folder=folder, flags_of=flags_of)

    monkeypatch.setattr(native, "recipe", small)
    monkeypatch.setattr(native, "declare", lambda _: None)
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HETERO_LLM_NATIVE", "1")
    native.load.cache_clear()
    yield folder
    native.load.cache_clear()


def stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def test_every_source_and_header_counts(sources: Path) -> None:
    first = native.build()
    before = stamp(first)
    assert first.parent == cache_dir() == sources.parent / "cache"
    assert native.build() == first and stamp(first) == before
    assert native.build(force=True) == first and stamp(first) != before
    names = {first.name}
    for changed in ("one.cpp", "part.h", "deeper/one.cpp", "deeper/part.h"):
        with (sources / changed).open("a") as file:
            file.write("// changed\n")
        names.add(native.build().name)
    assert len(names) == 5


def test_only_the_outer_folder_is_compiled_with_openmp(sources: Path) -> None:
    guard = "#if{0}def _OPENMP\n#error wrong flags\n#endif\n"
    (sources / "one.cpp").write_text(guard.format("n") + OUTER)
    (sources / "deeper/one.cpp").write_text(guard.format("") + INNER)
    native.build()


@pytest.mark.parametrize("left", [0, 10, 64, 5000, -1])
def test_a_truncated_library_is_built_anew(left: int) -> None:
    path = native.build()
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    assert native.open_library().hetero_isa_best() == 0
    assert len(path.read_bytes()) == len(whole)


def test_a_library_for_another_machine_is_built_anew() -> None:
    path = native.build()
    foreign = bytearray(path.read_bytes())
    struct.pack_into("<H", foreign, ELF_MACHINE, 0xF3)
    path.write_bytes(foreign)
    with pytest.raises(OSError):
        ctypes.CDLL(str(path))
    library = native.load()
    assert library is not None and library.hetero_isa_best() == 0


def test_a_library_that_cannot_be_loaded_is_built_anew_once(
    sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (sources / "one.cpp").write_text("int missing(); int f() { return missing(); }\n")
    with pytest.raises(OSError, match="missing"):
        native.open_library()
    with caplog.at_level(logging.WARNING):
        assert native.load() is None and native.load() is None
    assert caplog.text.count("plain torch serves") == 1
    assert "cannot be loaded" in caplog.text and "it is compiled again" in caplog.text


def test_a_failing_compiler_leaves_torch_and_one_line(
    sources: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (sources / "deeper/one.cpp").write_text("int f( { return 0; }\n")
    with caplog.at_level(logging.WARNING):
        assert native.load() is None
    assert "failed: " in caplog.text and "deeper/one.cpp" in caplog.text
    assert build.main([]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("the CPU library cannot be built: ") and err.count("\n") == 1
    assert not list(cache_dir().iterdir())


def test_build_command_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert build.main([]) == 1
    assert capsys.readouterr().err == "the CPU library cannot be built: no C++ compiler found\n"


def test_build_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("HETERO_LLM_CPU_ISA", raising=False)
    assert build.main(["--sanitize"]) == 0
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert lines["instruction set"] == "base"
    plain, sanitized = Path(lines["library"]), Path(lines["with sanitizers"])
    assert plain == native.build() and sanitized == native.build(sanitize=True)
    assert b"__asan_init" in sanitized.read_bytes()
    assert b"__asan_init" not in plain.read_bytes()
    before = stamp(plain)
    assert build.main([]) == 0 and stamp(plain) == before
    assert build.main(["--force"]) == 0 and stamp(plain) != before
    monkeypatch.setenv("HETERO_LLM_CPU_ISA", "avx2")
    assert build.main([]) == 1
    assert "HETERO_LLM_CPU_ISA='avx2': this machine has base" in capsys.readouterr().err


def test_several_processes_may_build_at_once() -> None:
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = int(ctypes.CDLL(str(native.build())).hetero_isa_best())
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert len(list(cache_dir().iterdir())) == 1


def test_no_compiler_is_asked_for_once_the_library_is_there(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = native.build()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert native.build() == path and native.open_library().hetero_isa_best() == 0
    assert build.main([]) == 0
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(sources.parent / "empty"))
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler found"):
        native.build()
    # A wheel brings it along.
    monkeypatch.setattr(cache_folder, "PREBUILT", path.parent)
    assert native.build() == path and native.open_library().hetero_isa_best() == 0
