"""The source distribution holds what git holds, and the package page stands alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked() -> set[str]:
    """Files of git, without those that begin with a dot."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached"], capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("needs git")
    names = filter(None, listed.stdout.split("\0"))
    return {name for name in names if not name.startswith(".") and (ROOT / name).exists()}


def test_the_sdist_is_complete(tmp_path: Path) -> None:
    """Large files are replaced by empty ones: the list of files counts."""
    names = tracked()
    tree = tmp_path / "tree"
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if "/" in name:
            (tree / name).touch()
        else:
            shutil.copy(ROOT / name, tree / name)
    page = tree / PROJECT["readme"]
    shutil.copy(ROOT / PROJECT["readme"], page)
    code = f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert names - packed == set()
    assert {name for name in packed - names if "egg-info" not in name} == {"PKG-INFO", "setup.cfg"}


def test_the_package_page_has_no_relative_links() -> None:
    text = (ROOT / PROJECT["readme"]).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []


@pytest.mark.parametrize("name", ["README.md", PROJECT["readme"]])
def test_the_way_around_cuda_is_one_line(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    before, _, after = text.partition(
        "pip install torch --index-url https://download.pytorch.org/whl/cpu"
    )
    assert "[server,bench]" in after and "[server,bench]" not in before


def test_classifiers_name_the_pythons() -> None:
    found = [each for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    versions = [each.rpartition(" ")[2] for each in found]
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    assert versions == [f"3.{minor}" for minor in range(int(low), int(high))]
