"""What every bench shares: where it ran, and how results are written."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Device, versions and commit, to stand beside every figure.

    BENCH_COMMIT names the commit where the tree travels without its .git folder.
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
    commit = (
        os.environ.get("BENCH_COMMIT")
        or subprocess.run(
            ["git", "describe", "--always", "--dirty"],
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
    }


def write_results(name: str, results: dict[str, Any], out: str | None) -> None:
    """Writes `results` with the environment as JSON; prints where."""
    path = Path(out) if out else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"bench": name, **environment(), **results}, indent=1) + "\n")
    print(f"written: {path}")


def print_table(rows: list[dict[str, Any]]) -> None:
    """A plain table, one line per row, columns of the first row."""
    columns = list(rows[0])
    texts = [[_text(row[c]) for c in columns] for row in rows]
    widths = [max(len(c), *(len(t[i]) for t in texts)) for i, c in enumerate(columns)]
    print("  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)))
    for text in texts:
        print("  ".join(t.rjust(w) for t, w in zip(text, widths, strict=True)))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
