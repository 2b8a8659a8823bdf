"""The cache of functions that numba compiles: what it finds again, and what it throws away."""

from __future__ import annotations

import ast
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hetero_llm.utils import jit

PACKAGE = Path(jit.__file__).parents[1]
OUTER = """
from hetero_llm.utils.jit import njit
from hetero_llm.test_inner import FACTOR

@njit(cache=True, nogil=True)
def scaled(x):
    return FACTOR * x
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiled module that imports another one, and an empty cache."""
    (tmp_path / "test_inner.py").write_text("FACTOR = 3\n")
    (tmp_path / "test_outer.py").write_text(OUTER)
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path
    for name in ("inner", "outer"):
        sys.modules.pop(f"hetero_llm.test_{name}", None)


def load(folder: Path) -> ModuleType:
    """The outer module as a new process would load it."""
    jit.read_sources_again()
    for name in ("inner", "outer"):
        full = f"hetero_llm.test_{name}"
        spec = importlib.util.spec_from_file_location(full, folder / f"test_{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        # Not `exec_module`: two changes within a second would find the old byte code.
        exec(compile((folder / f"test_{name}.py").read_text(), str(folder), "exec"), vars(module))
    return module


def outcome(folder: Path, argument: float) -> tuple[float, bool]:
    """The function's value for an argument, and whether its code came from the cache."""
    function = load(folder).scaled
    value = function(argument)
    return value, sum(function.stats.cache_hits.values()) == 1


def test_code_is_found_again_for_the_same_types_and_sources(sources: Path) -> None:
    assert outcome(sources, 2) == (6, False)
    assert outcome(sources, 5) == (15, True)
    assert outcome(sources, 0.5) == (1.5, False), "another type"
    assert outcome(sources, 1.5) == (4.5, True)
    files = list((sources / "cache" / jit.FOLDER).iterdir())
    assert len(files) == 2


def test_a_change_in_an_imported_module_counts(sources: Path) -> None:
    assert outcome(sources, 2) == (6, False)
    (sources / "test_inner.py").write_text("FACTOR = 4\n")
    assert outcome(sources, 2) == (8, False)
    (sources / "test_inner.py").write_text("FACTOR = 3\n")
    assert outcome(sources, 2) == (6, True)


def test_another_version_of_numba_finds_nothing(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcome(sources, 2) == (6, False)
    monkeypatch.setattr(jit, "versions", lambda: "other")
    assert outcome(sources, 2) == (6, False)


def test_damaged_files_are_compiled_again(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert outcome(sources, 2) == (6, False)
    (path,) = (sources / "cache" / jit.FOLDER).iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1], bytes(len(whole))):
        path.write_bytes(damaged)
        caplog.clear()
        assert outcome(sources, 2) == (6, False)
        assert len(caplog.records) == 1 and "is cut or damaged" in caplog.text
        assert outcome(sources, 2) == (6, True)


def test_a_whole_file_that_cannot_be_loaded_is_compiled_again(
    sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from hetero_llm.utils import cache_folder

    assert outcome(sources, 2) == (6, False)
    (path,) = (sources / "cache" / jit.FOLDER).iterdir()
    for content in (b"no pickle", b"cmissing\nname\n.", b"(K\x01K\x02t."):
        cache_folder.write(path, content)
        caplog.clear()
        assert outcome(sources, 2) == (6, False)
        assert len(caplog.records) == 1 and "cannot be loaded" in caplog.text


def test_a_full_disk_stops_nothing(
    sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    for argument in (2, 2.5):
        assert outcome(sources, argument) == (3 * argument, False)
    assert len([r for r in caplog.records if "cannot be kept" in r.message]) <= 1


def test_progress_is_said_once(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    from hetero_llm.utils import compile_progress

    compile_progress.finish()  # what tests before this one have compiled
    caplog.clear()
    with caplog.at_level(logging.INFO):
        outcome(sources, 2)
        outcome(sources, 2.5)
        compile_progress.finish()
        outcome(sources, 2)
        compile_progress.finish()
    assert [record.getMessage() for record in caplog.records] == [
        "compiling kernels once, about a minute",
        "compiled 2 kernels in 0 s, kept for later",
    ]


def test_every_compiled_function_of_ours_is_in_this_cache() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "numba":
                names = {alias.name for alias in node.names}
                assert not names & {"njit", "jit", "vectorize", "guvectorize", "cfunc"}, path


def test_imports_are_found_however_they_are_written() -> None:
    found = set(jit.imports_of("hetero_llm.engine.factory"))
    for name in (
        "hetero_llm.config.engine_config",  # from module import name
        "hetero_llm.utils.compile_progress",  # from package import module
        "hetero_llm.engine.builders.build_draft_worker",  # in parentheses
        "hetero_llm.spec_decode.lookahead.store",  # for type checkers
    ):
        assert name in found
    assert "hetero_llm.engine.factory.Engine" not in found


def test_nothing_is_cached_beside_the_sources() -> None:
    code = (
        "import numpy as np; from hetero_llm.spec_decode import budget;"
        "none = np.zeros(1, np.int32);"
        "budget.choose(np.zeros((1, 1), np.float32), none, np.ones(1, np.float32), np.zeros(1),"
        " np.ones(1, np.int64), 1, 0.0, 0.0, 8, none)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
    assert not [*PACKAGE.rglob("budget*.nbi")]
