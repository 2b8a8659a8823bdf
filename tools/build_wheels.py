"""Builds a wheel that brings the C++ libraries along, so that a machine without a compiler runs it.

    python tools/build_wheels.py [--out dist]

The libraries hold the kernels for every instruction set of this architecture (cpu/csrc/step/isa.h)
and choose one when they run: one wheel for each architecture, built on such a machine. Its tag
names the oldest C library that it runs with, that of the machine it was built on: build it on an
old one, such as a manylinux image. Drafting's functions are not in it; numba compiles them at the
first start.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "docs/package_page.md", "LICENSE")
_OLDEST = (2, 17)  # of manylinux2014


def build(out: Path) -> Path:
    """Builds the wheel into a folder and returns its path.

    Raises:
        subprocess.CalledProcessError: the compiler or pip failed; they have said why.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = folder / "tree"
        shutil.copytree(
            ROOT / "hetero_llm", tree / "hetero_llm",
            ignore=shutil.ignore_patterns("__pycache__", "prebuilt"),
        )  # fmt: skip
        for file in FILES:
            (tree / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / file, tree / file)
        libraries = compile_libraries(tree, folder / "cache")
        prebuilt = tree / "hetero_llm" / "prebuilt"
        prebuilt.mkdir()
        for library in libraries:
            shutil.copy(library, prebuilt)
        tag = platform_tag(libraries)
        command = [
            sys.executable, "-m", "pip", "wheel", str(tree), "--quiet", "--no-deps",
            "--no-build-isolation", "--wheel-dir", str(folder / "wheels"),
            f"--config-settings=--build-option=--plat-name={tag}",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        (wheel,) = (folder / "wheels").glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def compile_libraries(tree: Path, cache: Path) -> list[Path]:
    """Compiles the libraries of a source tree into an empty folder; returns their files."""
    variables = {"PYTHONPATH": str(tree), "HETERO_LLM_CACHE_DIR": str(cache)}
    for module in ("hetero_llm.cpu.build", "hetero_llm.bridge.build"):
        subprocess.run(
            [sys.executable, "-m", module], check=True, cwd=cache.parent, stdout=sys.stderr,
            env={**os.environ, **variables, "HETERO_LLM_NATIVE": "1"},
        )  # fmt: skip
    return sorted(cache.glob("*.so"))


def platform_tag(libraries: list[Path]) -> str:
    """The tag for the newest version of the C library that any of the libraries needs."""
    needed = {_OLDEST}
    for library in libraries:
        shown = subprocess.run(
            ["readelf", "--version-info", str(library)], check=True, capture_output=True, text=True
        ).stdout
        needed |= {(int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", shown)}
    major, minor = max(needed)
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheel")
    print(build(parser.parse_args().out))


if __name__ == "__main__":
    main()
