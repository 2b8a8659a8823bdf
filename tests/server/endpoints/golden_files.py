"""Golden files of streams: ids and times are masked."""

from __future__ import annotations

import os
import re
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden")


def masked(text: str) -> str:
    text = re.sub(r"[0-9a-f]{32}", "ID", text)
    return re.sub(r'"(created_at|completed_at)":\d+', r'"\1":0', text)


def check_golden(name: str, content: str) -> None:
    """Compares with the file; WRITE_GOLDEN=1 writes it first, after a change of the rules."""
    file, text = GOLDEN / name, masked(content)
    if os.environ.get("WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def named_events(text: str) -> list[tuple[str, str]]:
    """The name and the data of each event of a stream; comments are left out."""
    found = []
    for frame in text.split("\n\n"):
        if not frame or frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        assert name.startswith("event: ") and data.startswith("data: "), frame
        found.append((name.removeprefix("event: "), data.removeprefix("data: ")))
    return found
