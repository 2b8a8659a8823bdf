"""The mailbox and its team under ThreadSanitizer: a program of its own, since a process takes one
sanitizer only. Part of `make test-native`; compiling it takes most of its time."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hetero_llm.cpu import native
from hetero_llm.utils.native_build import HEADERS

SOURCES = Path(native.__file__).parent / "csrc"
PROGRAM = Path(__file__).with_name("thread_check.cpp")
FLAGS = ("-std=c++17", "-O1", "-g", "-w", "-fsanitize=thread", f"-I{SOURCES}", f"-I{HEADERS}")

pytestmark = [
    pytest.mark.skipif(native.native_choice() != "sanitized", reason="a part of make test-native"),
    pytest.mark.timeout(600),
]


def test_no_data_race_and_no_wrong_answer(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None
    step = [SOURCES / "step" / f"{name}.cpp" for name in ("team", "isa", "rows")]
    # Without the sanitizer whose runtime is loaded ahead of Python.
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}

    def compiled(source: Path) -> str:
        built = str(tmp_path / f"{source.stem}.o")
        subprocess.run([compiler, *FLAGS, "-c", str(source), "-o", built], check=True, env=plain)
        return built

    with ThreadPoolExecutor(2) as pool:
        experts = sorted((SOURCES / "experts").glob("*.cpp"))
        objects = list(pool.map(compiled, [PROGRAM, *experts, *step]))
    program = str(tmp_path / "thread_check")
    subprocess.run(
        [compiler, "-fsanitize=thread", "-pthread", *objects, "-o", program], check=True, env=plain
    )
    done = subprocess.run([program], capture_output=True, text=True, env=plain)
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stdout + done.stderr
