"""Records the readings of a server's status page during a load, for tests of the page.

Used by bench.server.http_serving; tests/browser replays such a file to the page.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 1.0
"""As often as the page asks."""
_PATIENCE = 10.0


@contextmanager
def recorded(url: str, model: str, file: Path, *, source: str) -> Iterator[None]:
    """Writes the readings taken while the context is open to `file` when it closes.

    Args:
        model: as passed to the server; only the last part of its path is kept, and nothing else
            that names the machine.
        source: description of what was recorded.

    Raises:
        OSError: the server did not answer, or the file cannot be written.
    """
    readings: list[dict[str, Any]] = []
    failures: list[OSError] = []
    ended = threading.Event()

    def read() -> None:
        try:
            while not ended.wait(SECONDS):
                with urllib.request.urlopen(f"{url}/status.json", timeout=_PATIENCE) as answer:
                    readings.append(without_paths(json.load(answer), model))
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_PATIENCE)
    if failures:
        raise failures[0]
    write(file, source, readings)


def without_paths(reading: dict[str, Any], model: str) -> dict[str, Any]:
    """A reading that names the model by the last part of its path, without the plan of cores."""
    text = json.dumps({**reading, "plan": None})
    shown: dict[str, Any] = json.loads(text.replace(json.dumps(model)[1:-1], Path(model).name))
    return shown


def write(file: Path, source: str, readings: list[dict[str, Any]]) -> None:
    """One reading a line."""
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in readings)
    file.write_text(f'{{"source": {json.dumps(source)},\n"readings": [\n{lines}\n]}}\n')
