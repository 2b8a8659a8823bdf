"""bench/README.md lists every bench."""

from __future__ import annotations

import re
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_every_bench_is_in_the_index() -> None:
    index, room, listed = (BENCH / "README.md").read_text(), "", set()
    for line in index.splitlines():
        if found := re.match(r"\| Command `python -m bench\.(\w+)\.`", line):
            room = found[1]
        elif found := re.match(r"\| `(\w+)` \|", line):
            listed.add(f"{room}/{found[1]}")
    rooms = ("engine", "offload", "speculation", "server", "kernels")
    files = (path for name in rooms for path in (BENCH / name).glob("*.py"))
    assert listed == {
        f"{path.parent.name}/{path.stem}" for path in files if "__main__" in path.read_text()
    }
