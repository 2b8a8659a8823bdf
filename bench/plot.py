"""Draws a picture of each bench's results into docs/images/bench.

    python -m bench.plot            # those that are not of the files in bench/results
    python -m bench.plot NAME ...   # these

What is in which picture, and why a file is in none, says `bench.pictures`. A picture holds the
SHA-256 of what it was drawn from: the results files and their panels.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common import RESULTS
from bench.pictures import PICTURES, Panel, Picture

IMAGES = Path(__file__).parents[1] / "docs" / "images" / "bench"
SOURCE_KEY = "Source"
Points = list[tuple[Any, float]]

_COLUMNS = 3
_PANEL_INCHES = (4.4, 3.1)
_BAR_INCHES = 0.17
_DPI = 115
_MOST_COLOURS = 48
_MOST_LABELS = 16  # figures above the bars of a panel; across: as many as there are bars
_COLOURS = (
    "#1f6f8b", "#c2571a", "#7a4fa3", "#4f8f3a", "#b8860b", "#c94f7c", "#555555", "#3aa6a0",
)  # fmt: skip
_STYLES = ("-", "--", ":")


def load(name: str) -> dict[str, Any]:
    """A file of bench/results by its name without `.json`."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def fingerprint(picture: Picture) -> str:
    """SHA-256 of the panels and of the files that they show."""
    digest = hashlib.sha256()
    for panel in picture.panels:
        digest.update(panel.key().encode())
        for name in panel.files:
            digest.update((RESULTS / f"{name}.json").read_bytes())
    return digest.hexdigest()


def drawn_from(path: Path) -> str | None:
    """The fingerprint that a picture holds; None if there is no picture."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        return image.info.get(SOURCE_KEY)


def series(panel: Panel) -> dict[tuple[str, str], Points]:
    """The panel's points by (group, column's name), in the order of the rows. A row without a
    number in a column has no point there.

    Raises:
        ValueError: no row has a number, a row lacks a column of the panel, or a group has two
            rows for one place.
    """
    found: dict[tuple[str, str], Points] = {}
    for row in panel.table({name: load(name) for name in panel.files}):
        group = ", ".join(_group_name(column, row[column]) for column in panel.by)
        for column, label in panel.columns.items():
            if column not in row:
                raise ValueError(f"{panel.files}: no {column!r} in {row}")
            value = number(row[column])
            if value is None:
                continue
            points = found.setdefault((group, label), [])
            if any(place == row[panel.x] for place, _ in points):
                raise ValueError(f"{panel.files}: {group!r} has {row[panel.x]!r} twice")
            points.append((row[panel.x], value))
    if not found:
        raise ValueError(f"{panel.files}: nothing to draw")
    return found


def _group_name(column: str, value: Any) -> str:
    return f"{column} {value}" if isinstance(value, (int, float)) else str(value)


def number(value: Any) -> float | None:
    """A figure; of a range such as `4.80-4.93`, the peer's two runs, its better end; None for "-",
    which stands where nothing was measured."""
    if isinstance(value, (int, float)):
        return float(value)
    low = str(value).partition("-")[0] if value is not None else ""
    return float(low) if low else None


def caption(picture: Picture) -> str:
    """One line for each results file: its name, machine, versions and commit."""
    lines = []
    for name in dict.fromkeys(name for panel in picture.panels for name in panel.files):
        found = load(name)
        machine = f"{found['cpu']}, {found['cores']} cores"
        if found["gpu"]:
            machine = f"{found['gpu']}; {machine}"
        lines.append(f"{name}.json: {machine}; torch {found['torch']}; commit {found['commit']}")
    return "\n".join(lines)


def draw(picture: Picture) -> bytes:
    """The picture as PNG, with few colours and its fingerprint."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    panels = picture.panels
    columns = 2 if len(panels) == 4 else min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    below = 0.13 * (caption(picture).count("\n") + 1)
    height = max(map(_height, panels)) * lines + below + 0.4
    figure = Figure(figsize=(max(columns * _PANEL_INCHES[0], 6.4), height), dpi=_DPI)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", rect=(0, below / height, 1, 1 - below / height))
    figure.suptitle(picture.title, fontsize=11)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel, place in zip(panels, axes, strict=False):
        _draw_panel(place, panel)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    figure.text(0.01, 0.05 / height, caption(picture), fontsize=6.5, color="#444444", va="bottom")
    data = io.BytesIO()
    figure.savefig(data, format="png")
    image = Image.open(data).convert("RGB").quantize(_MOST_COLOURS, dither=Image.Dither.NONE)
    info = PngInfo()
    info.add_text(SOURCE_KEY, fingerprint(picture))
    small = io.BytesIO()
    image.save(small, format="png", optimize=True, pnginfo=info)
    return small.getvalue()


def _height(panel: Panel) -> float:
    if panel.kind != "across":
        return _PANEL_INCHES[1]
    found = series(panel)
    places = {place for points in found.values() for place, _ in points}
    return max(_PANEL_INCHES[1], _BAR_INCHES * len(places) * len(found) + 1.1)


def _draw_panel(axes: Any, panel: Panel) -> None:
    found = series(panel)
    if panel.kind == "lines":
        _draw_lines(axes, panel, found)
    else:
        _draw_bars(axes, found, across=panel.kind == "across")
    label, other = ("xlabel", "ylabel") if panel.kind == "across" else ("ylabel", "xlabel")
    axes.set(**{label: panel.unit, other: panel.x_label})
    axes.set_title(panel.title, fontsize=9)
    if "y" in panel.log:
        across = panel.kind == "across"
        (axes.set_xscale if across else axes.set_yscale)("log")
        _write_plain_numbers(axes.xaxis if across else axes.yaxis, (1,) if across else (1, 2, 5))
    elif panel.kind == "lines":
        axes.set_ylim(0, 1.08 * max(value for points in found.values() for _, value in points))
    if panel.level is not None:
        line = axes.axvline if panel.kind == "across" else axes.axhline
        line(panel.level, color="black", linewidth=0.8)
    axes.grid(alpha=0.3, axis="x" if panel.kind == "across" else "y")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
    axes.xaxis.label.set_size(8)
    axes.yaxis.label.set_size(8)
    if any(map("".join, found)):
        beside = min(len(found), 4) if panel.kind != "lines" else 1
        place = "upper center" if panel.kind != "lines" else "best"
        axes.legend(fontsize=6.5, framealpha=0.6, ncols=beside, loc=place, columnspacing=1.0)


def _write_plain_numbers(axis: Any, times: tuple[int, ...]) -> None:
    """At these times the powers of ten of a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=times))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _name(key: tuple[str, str]) -> str:
    return ", ".join(filter(None, key))


def _draw_lines(axes: Any, panel: Panel, found: Mapping[tuple[str, str], Points]) -> None:
    """A colour for each group and a style for each column; one group: a colour for each column."""
    groups = list(dict.fromkeys(group for group, _ in found))
    labels = list(dict.fromkeys(label for _, label in found))
    for key, points in found.items():
        group, label = groups.index(key[0]), labels.index(key[1])
        colour, style = (group, label) if len(groups) > 1 else (label, 0)
        axes.plot(
            *zip(*sorted(points), strict=True), _STYLES[style % len(_STYLES)], marker="o",
            markersize=3, linewidth=1.3, color=_COLOURS[colour % len(_COLOURS)], label=_name(key),
        )  # fmt: skip
    if "x" in panel.log:
        axes.set_xscale("log", base=2)
        ticks = sorted({place for points in found.values() for place, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()


def _draw_bars(axes: Any, found: Mapping[tuple[str, str], Points], *, across: bool) -> None:
    """A group of bars for each place, a bar in it for each series, and room above for a legend."""
    places = list(dict.fromkeys(place for points in found.values() for place, _ in points))
    width = 0.8 / len(found)
    for index, (key, points) in enumerate(found.items()):
        at = [places.index(place) + (index + 0.5) * width - 0.4 for place, _ in points]
        values = [value for _, value in points]
        colour = _COLOURS[index % len(_COLOURS)]
        bars = (axes.barh if across else axes.bar)(at, values, width, color=colour)
        bars.set_label(_name(key))
        if across or len(places) * len(found) <= _MOST_LABELS:
            axes.bar_label(bars, [_short(value) for value in values], fontsize=5.5, padding=1)
    names = [str(place) for place in places]
    if across:
        axes.set_yticks(range(len(places)), names)
        axes.set_ylim(len(places) - 0.5, -0.5 - (0.04 * len(places) + 0.3) * (len(found) > 1))
    else:
        axes.set_xticks(range(len(places)), names)
        most = max(value for points in found.values() for _, value in points)
        axes.set_ylim(0, (1.1 + 0.08 * -(-len(found) // 4)) * most)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in PICTURES]
    if unknown:
        parser.error(f"{unknown[0]!r}: one of {', '.join(PICTURES)}")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        path = IMAGES / f"{name}.png"
        if name in args.names or not args.names and drawn_from(path) != fingerprint(picture):
            path.write_bytes(draw(picture))
            print(f"written: {path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
