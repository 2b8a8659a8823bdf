"""Every results file has its picture or a reason why not, and the pictures are of these files."""

from __future__ import annotations

import io
import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from bench import plot
from bench.common import RESULTS
from bench.pictures import ELSEWHERE, NOT_DRAWN, PICTURES, Panel, Picture
from bench.plot import IMAGES, draw, drawn_from, fingerprint, number, series

ROOT = Path(__file__).parents[2]
MOST_BYTES = 60_000
PNG = b"\x89PNG"


def pictures_of(pattern: str) -> set[str]:
    """The pictures, as paths in docs/images, of the results files that a pattern names."""
    drawn = {
        f"bench/{name}.png"
        for name, picture in PICTURES.items()
        for panel in picture.panels
        for file in panel.files
        if fnmatch(file, pattern) or fnmatch(file, f"{pattern}.*")
    }
    return drawn | {
        image
        for file, image in ELSEWHERE.items()
        if fnmatch(file, pattern) or fnmatch(file, f"{pattern}.*")
    }


def test_every_results_file_is_drawn_or_says_why_not() -> None:
    files = {str(p.relative_to(RESULTS)).removesuffix(".json") for p in RESULTS.rglob("*.json")}
    drawn = {file for p in PICTURES.values() for panel in p.panels for file in panel.files}
    assert drawn | ELSEWHERE.keys() | NOT_DRAWN.keys() == files
    assert not drawn & (ELSEWHERE.keys() | NOT_DRAWN.keys())
    assert all(NOT_DRAWN.values())
    assert all((IMAGES.parent / image).is_file() for image in ELSEWHERE.values())


@pytest.mark.parametrize("name", list(PICTURES))
def test_the_committed_picture_is_of_the_committed_results(name: str) -> None:
    pytest.importorskip("PIL")
    path = IMAGES / f"{name}.png"
    assert drawn_from(path) == fingerprint(PICTURES[name]), "run python -m bench.plot"
    assert path.stat().st_size < MOST_BYTES
    for panel in PICTURES[name].panels:
        assert series(panel)


def test_no_picture_is_left_over() -> None:
    assert {path.stem for path in IMAGES.iterdir()} == PICTURES.keys()


def test_the_benchmarks_page_shows_each_in_its_section() -> None:
    section, shown = "", {}
    for line in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif found := re.fullmatch(r"!\[[^]]+\]\(images/bench/(\w+)\.png\)", line):
            shown[found[1]] = section
    assert shown == {name: picture.section for name, picture in PICTURES.items()}


def test_the_index_links_the_picture_of_each_bench() -> None:
    linked = set()
    for line in (ROOT / "bench" / "README.md").read_text(encoding="utf-8").splitlines():
        if not re.match(r"\| `\w+` \|", line):
            continue
        cell = line.split("|")[-2]
        images = set(re.findall(r"\]\(\.\./docs/images/([\w/]+\.png)\)", cell))
        wanted = set().union(*map(pictures_of, re.findall(r"`([^`]+)`", cell)))
        assert wanted <= images, line
        linked |= images
    assert linked == {f"bench/{name}.png" for name in PICTURES} | set(ELSEWHERE.values())


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a results file with these rows."""
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    machine = {"cpu": "a CPU", "cores": 2, "gpu": None, "torch": "2.0", "commit": "0123abc"}

    def write(name: str, rows: list[dict[str, Any]], **more: Any) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({**machine, **more, "rows": rows}))

    return write


PANEL = Panel(("a.c",), "a title", {"ms": "ours", "peer": "theirs"}, x="batch", unit="ms")


def test_points_by_group_and_column(results: Any) -> None:
    results("a.c", [
        {"batch": 1, "cache": "raw", "ms": 2.0, "peer": "4.8-4.9"},
        {"batch": 8, "cache": "raw", "ms": 3, "peer": "-"},
        {"batch": 1, "cache": "turbo", "ms": 5.0, "peer": None},
    ], dtype="bf16")  # fmt: skip
    panel = Panel(**{**vars(PANEL), "by": ("cache", "dtype", "machine", "at")})
    raw, turbo = (
        f"{c}, bf16, 2-core CPU box, commit 0123abc" for c in ("raw", "turbo")
    )  # fmt: skip
    assert series(panel) == {
        (raw, "ours"): [(1, 2.0), (8, 3.0)],
        (raw, "theirs"): [(1, 4.8)],
        (turbo, "ours"): [(1, 5.0)],
    }
    only = Panel(**{**vars(PANEL), "where": {"cache": "turbo"}, "by": ("batch",)})
    assert series(only) == {("batch 1", "ours"): [(1, 5.0)]}


def test_what_cannot_be_drawn_is_an_error(results: Any) -> None:
    results("a.c", [{"batch": 1, "ms": 2.0}])
    with pytest.raises(ValueError, match="no 'peer'"):
        series(PANEL)
    results("a.c", [{"batch": 1, "ms": "-", "peer": "-"}])
    with pytest.raises(ValueError, match="nothing to draw"):
        series(PANEL)
    results("a.c", [{"batch": 1, "ms": 1, "peer": 2}, {"batch": 1, "ms": 3, "peer": 4}])
    with pytest.raises(ValueError, match="1 twice"):
        series(PANEL)
    with pytest.raises(ValueError):
        number("fast")


@pytest.mark.parametrize("kind", ["lines", "bars", "across"])
@pytest.mark.parametrize("log", ["", "xy"])
def test_a_picture_knows_what_it_was_drawn_from(results: Any, kind: Any, log: str) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    results("a.c", [{"batch": n, "ms": n / 2, "peer": n} for n in (1, 8, 64)])
    panel = Panel(**{**vars(PANEL), "kind": kind, "log": log, "level": 1.0})
    picture = Picture("a title", "Decode", (panel, panel))
    data = draw(picture)
    assert data.startswith(PNG)
    with Image.open(io.BytesIO(data)) as image:
        assert image.info[plot.SOURCE_KEY] == fingerprint(picture)
        assert len(set(image.convert("L").tobytes())) > 5, "an empty picture"
    before = fingerprint(picture)
    results("a.c", [{"batch": 1, "ms": 7.0, "peer": 2.0}])
    assert fingerprint(picture) != before


def test_an_unknown_name(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["plot", "nothing"])
    with pytest.raises(SystemExit):
        plot.main()
    assert "'nothing': one of gpu_suite" in capsys.readouterr().err
