from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetero_llm.bench_client.plots import load_name, write_plot
from hetero_llm.core.errors import HeteroLLMError
from tests.bench_client.points import FAILED, OK, SLOW, point, run


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [
        point(run([OK, SLOW], 10.0, None), max_concurrency=1),
        point(run([OK] * 20, 4.0, None), max_concurrency=8),
        point(run([FAILED], 1.0, None), max_concurrency=64),
    ]
    write_plot(tmp_path / "a.png", points, "a model")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000
    write_plot(tmp_path / "b.png", points[2:], "nothing to see")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(HeteroLLMError, match=r"pip install 'hetero-llm\[bench\]'"):
        write_plot(tmp_path / "a.png", [], "")


@pytest.mark.parametrize(
    ("rate", "limit", "name"),
    [
        (float("inf"), None, "all at once"),
        (2.5, None, "2.5 req/s"),
        (float("inf"), 8, "8 at once"),
        (4.0, 8, "4 req/s, 8 at once"),
    ],
)
def test_load_names(rate: float, limit: int | None, name: str) -> None:
    assert load_name(point(run([OK], 1.0, None), rate=rate, max_concurrency=limit)) == name
