"""Two threads on one ring under ThreadSanitizer and AddressSanitizer, in a program of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_llm.bridge.ipc import ring_library
from hetero_llm.utils.native_build import HEADERS, PORTABLE, find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

SOURCES = Path(ring_library.__file__).parent / "csrc"
STRESS = Path(__file__).with_name("ring_stress.cpp")
RECORDS = "3000"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles the program with a sanitizer, its ring's source changed by `change`."""

    def made(sanitizer: str, change: Callable[[str], str] = lambda text: text) -> Path:
        folder = tmp_path_factory.mktemp("stress")
        shutil.copytree(SOURCES, folder / "csrc")
        ring = folder / "csrc" / "ring.cpp"
        # A sleeper that is not woken sleeps too long here, instead of looking for itself.
        source = ring.read_text().replace("LongestNapNs = 100'000'000", "LongestNapNs = 1LL << 60")
        assert "1LL << 60" in source
        ring.write_text(change(source))
        program = folder / "stress"
        sources = [str(path) for path in (folder / "csrc").glob("*.cpp")]
        flags = [*PORTABLE, "-O1", "-g", f"-fsanitize={sanitizer}"]
        flags += [f"-I{headers}" for headers in (folder / "csrc", HEADERS)]
        # A copy that the compiler expands is one that the thread sanitizer does not see.
        flags.append("-fno-builtin-memcpy")
        done = subprocess.run(
            [str(find_compiler()), *flags, "-pthread", str(STRESS), *sources, "-o", str(program)],
            capture_output=True,
            text=True,
        )
        if "cannot find -l" in done.stderr:
            pytest.skip(f"the compiler has no {sanitizer} sanitizer")
        assert done.returncode == 0, done.stderr
        return program

    return made


def run(program: Path, spin_us: int) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(program), RECORDS, str(spin_us)], capture_output=True, text=True, timeout=300
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    return done


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_two_threads(build: Callable[..., Path], sanitizer: str) -> None:
    program = build(sanitizer)
    for spin_us in (0, 50):
        done = run(program, spin_us)
        assert (done.returncode, done.stdout) == (0, f"{RECORDS} messages, 0 wrong\n"), done.stderr
        assert done.stderr == ""


def test_the_thread_sanitizer_would_find_it(build: Callable[..., Path]) -> None:
    """Without the order that the atomics give, it reports races."""
    program = build(
        "thread", lambda text: re.sub(r"memory_order_\w+", "memory_order_relaxed", text)
    )
    assert "data race" in run(program, 50).stderr
