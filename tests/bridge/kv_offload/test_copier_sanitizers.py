"""The copy thread and its caller under ThreadSanitizer, in a program of its own over the fake
driver."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hetero_llm.bridge.kv_offload import copier_library
from hetero_llm.utils.native_build import HEADERS, PORTABLE, find_compiler
from tests.bridge.kv_offload.conftest import FAKE_SOURCE

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

SOURCES = Path(copier_library.__file__).parent / "csrc"
STRESS = Path(__file__).with_name("copier_stress.cpp")
ROUNDS = "120"
FLAGS = (
    "-O0", "-g", "-fsanitize=thread", "-fno-builtin-memcpy", "-pthread", f"-I{SOURCES}",
    f"-I{HEADERS}",
)  # fmt: skip


def build(*arguments: str) -> None:
    command = [str(find_compiler()), *FLAGS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot find -l" in done.stderr:
        pytest.skip("the compiler has no thread sanitizer")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fake") / "fake.so"
    build("-std=c++17", "-fPIC", "-shared", str(FAKE_SOURCE), "-o", str(path))
    return path


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Objects of all sources but copier.cpp."""
    folder = tmp_path_factory.mktemp("others")
    sources = [STRESS, *(path for path in SOURCES.glob("*.cpp") if path.name != "copier.cpp")]
    objects = [str(folder / f"{path.stem}.o") for path in sources]
    for path, made in zip(sources, objects):
        build(*PORTABLE, "-c", str(path), "-o", made)
    return objects


def link(folder: Path, others: list[str], copier: str) -> Path:
    """The stress program with this source of the copier."""
    source, program = folder / "copier.cpp", folder / "stress"
    source.write_text(copier)
    build(*PORTABLE, str(source), *others, "-ldl", "-o", str(program))
    return program


def run(program: Path, fake: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(program), str(fake), ROUNDS], capture_output=True, text=True, timeout=300
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    return done


def test_the_copy_thread(tmp_path: Path, fake: Path, others: list[str]) -> None:
    done = run(link(tmp_path, others, (SOURCES / "copier.cpp").read_text()), fake)
    assert (done.returncode, done.stdout) == (0, f"{ROUNDS} over, 0 wrong\n"), done.stderr
    assert done.stderr == ""


def test_the_thread_sanitizer_would_tell(tmp_path: Path, fake: Path, others: list[str]) -> None:
    """The thread counts what has landed without the lock: that is found out, if not at once."""
    source = (SOURCES / "copier.cpp").read_text()
    land = re.search(r"^bool Copier::land\(.*?^}", source, re.MULTILINE | re.DOTALL)
    assert land is not None and "    Held held(mutex_);\n" in land[0]
    changed = source.replace(land[0], land[0].replace("    Held held(mutex_);\n", ""))
    program = link(tmp_path, others, changed)
    assert any("data race" in run(program, fake).stderr for _ in range(6))
