"""Tests lie where their module lies: `hetero_llm/a/b.py` is tested in `tests/a/test_b.py`, or in
several files `tests/a/test_b_<aspect>.py`. What tests no single module is a scenario."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Folders of scenario tests, and of tests of bench/ and tools/.
_OTHERS = (
    *("scenarios", "gpu/scenarios", "faults", "browser", "clients", "quant_tools"),
    *("two_gpus", "tools", "bench", "ray"),
)

_ENDINGS = (".py", ".cpp", ".h")


def _mirrored() -> list[Path]:
    tests = ROOT / "tests"
    return [
        path.relative_to(tests)
        for path in tests.rglob("test_*.py")
        if not path.relative_to(tests).as_posix().startswith(tuple(f"{one}/" for one in _OTHERS))
    ]


def _tests_a_module(test: Path) -> bool:
    folder = ROOT / "hetero_llm" / test.parent
    words = test.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    return any(
        (folder / name).is_dir() or any((folder / f"{name}{end}").exists() for end in _ENDINGS)
        for name in names
    )


def test_every_test_mirrors_a_module_or_is_a_scenario() -> None:
    about = ("import_rules", "layout", "exports", "deploy", "no_privates", "packaging")
    here = {Path(f"test_{name}.py") for name in about}
    strays = [str(test) for test in _mirrored() if test not in here and not _tests_a_module(test)]
    assert strays == []


def test_the_engine_is_a_folder_that_a_newcomer_can_read() -> None:
    """At most 25 files; what grows beyond gets a room of its own beneath."""
    assert len(list((ROOT / "hetero_llm" / "engine").glob("*.py"))) <= 25


def test_the_readme_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_no_file_is_cut_out_of_another() -> None:
    """A file is a subject of its own, not "part of x, which alone calls it"."""
    cut = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "hetero_llm").rglob("*.py"))
        if re.search(r"[Pp]art of .{0,80}which alone", path.read_text(encoding="utf-8"), re.DOTALL)
    ]
    assert cut == []


def test_the_tests_that_the_outside_look_names_are_there() -> None:
    """A name without a file is of the file named before it; most files are below tests/."""
    missing = []
    for line in (ROOT / "docs" / "history" / "outside_look.md").read_text().splitlines():
        text = ""
        for name in re.findall(r"`([^` ]+)`", line) if line.startswith("|") else ():
            file, _, test = name.partition("::")
            if file.endswith(".py"):
                paths = [path for path in (ROOT / "tests" / file, ROOT / file) if path.exists()]
                text = paths[0].read_text() if paths else ""
                if not paths:
                    missing.append(name)
            if test and not re.search(rf"(def|class) {test.rpartition('::')[2]}\b", text):
                missing.append(name)
    assert missing == []
