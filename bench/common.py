"""What every bench shares: arguments, the machine it ran on and its load, tables and results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hetero_llm.utils.neighbours import busy_line, cpu_ticks

RESULTS = Path(__file__).parent / "results"
Rows = list[dict[str, Any]]
"""A table: column to value, of each row."""


def bench_parser(description: str | None, out: str = "JSON file") -> argparse.ArgumentParser:
    """A parser that shows the docstring as written and knows --out. `out`: what that names."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help=out)
    return parser


def numbers(text: str) -> list[int]:
    """Type of an argument: "1,8" -> [1, 8]."""
    return [int(word) for word in text.split(",")]


def names_of(known: tuple[str, ...]) -> Any:
    """Type of an argument: comma-separated names, all of them in `known`, returned in its order."""

    def parse(text: str) -> list[str]:
        wanted = text.split(",")
        for name in wanted:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}: one of {', '.join(known)}")
        return [name for name in known if name in wanted]

    return parse


def settings_of(args: argparse.Namespace, names: str) -> dict[str, Any]:
    """The arguments of these names, which have spaces between; of a model's folder its name only.
    For the results."""
    values = {name: getattr(args, name) for name in names.split()}
    for name in ("model", "draft"):
        if values.get(name):
            values[name] = Path(values[name]).name
    return values


def machine_of(device: str) -> str:
    """The last word of a results file's name: a CPU box or a node with GPUs."""
    return "c" if device == "cpu" else "g"


def median_ratio(ours: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios of two arms that took turns."""
    return median(a / b for a, b in zip(ours, base, strict=True))


def environment() -> dict[str, Any]:
    """Device, versions, commit and the machine's load, to stand beside every figure.

    BENCH_COMMIT names the commit where the tree travels without its .git folder. `load`: runnable
    processes, means of the last 1, 5 and 15 minutes. `steal`: share of the machine's CPU time since
    this module was imported that the hypervisor gave to others; None if it is not known.

    Raises:
        ValueError: BENCH_COMMIT is neither a commit nor a commit with `-dirty` behind it.
    """
    import torch
    import transformers

    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    named = os.environ.get("BENCH_COMMIT", "")
    if named and not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", named):
        raise ValueError(f"BENCH_COMMIT={named!r}: must be a commit, or a commit and -dirty")
    commit = (
        named
        or subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
        ).stdout.strip()
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit or "unknown",
        "load": [round(mean, 2) for mean in os.getloadavg()],
        "steal": _steal_since(_CPU_TICKS_AT_IMPORT),
    }


def _steal_since(before: list[int]) -> float | None:
    after = cpu_ticks()
    if len(before) < 8 or len(after) < 8:
        return None
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return round(spent[7] / max(sum(spent), 1), 4)


_CPU_TICKS_AT_IMPORT = cpu_ticks()


def write_results(name: str, results: dict[str, Any], out: str | None) -> None:
    """Writes `results` with the environment as JSON, to `out` or bench/results; prints where, and
    whether other programs use the machine."""
    path = Path(out) if out else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"bench": name, **environment(), **results}, indent=1) + "\n")
    print(f"written: {path}")
    print(busy_line(), end="")


def report(name: str, about: dict[str, Any], rows: Rows, out: str | None) -> None:
    """Prints the rows as a table and writes them as "rows" behind `about`."""
    print_table(rows)
    write_results(name, {**about, "rows": rows}, out)


def say(row: dict[str, Any]) -> None:
    """Prints a row as soon as it is known; the table follows at the end."""
    print(*(f"{name}={_text(value)}" for name, value in row.items()), flush=True)


def print_table(rows: Rows) -> None:
    """A plain table, one line per row, columns of the first row."""
    columns = list(rows[0])
    cells = [[_text(row[c]) for c in columns] for row in rows]
    widths = [max(len(c), *(len(t[i]) for t in cells)) for i, c in enumerate(columns)]
    print("  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)))
    for line in cells:
        print("  ".join(t.rjust(w) for t, w in zip(line, widths, strict=True)))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
