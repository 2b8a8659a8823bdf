"""The clients' own environments, and running a script in one of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
SECONDS = 1200.0  # for one client; only a hang comes near, even on a machine with other work
IN_TIME = pytest.mark.timeout(SECONDS + 60)
"""Of tests that wait for a client: longer than other tests may take."""
NODE = "ai_sdk"
"""The environment of Node's packages; all others are virtual environments of Python's."""
_DISCARD = "http://127.0.0.1:9"  # as a proxy it refuses everything that is not on this machine


def missing(name: str) -> str | None:
    """Why nothing can be run in this environment; None if something can."""
    if name == NODE and shutil.which("node") is None:
        return "Node is not installed here"
    contents = "node_modules/ai" if name == NODE else "bin/python"
    if (ENVIRONMENTS / name / contents).exists():
        return None
    return f"no environment .venv-clients/{name}: run `make test-clients`"


def needs(name: str) -> pytest.MarkDecorator:
    """Skips tests, and the servers that they would start, without this environment."""
    reason = missing(name)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def run(
    name: str,
    command: Sequence[str],
    home: Path,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Runs a program of an environment, offline and with nothing of the user's settings.

    Args:
        home: an empty folder for what it wants to keep.

    Returns:
        What it printed.

    Raises:
        AssertionError: it failed or printed a traceback of its own.
    """
    folder = ENVIRONMENTS / name / "bin"
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "HTTP_PROXY": _DISCARD,
        "HTTPS_PROXY": _DISCARD,
        "NO_PROXY": "127.0.0.1",
        **(variables or {}),
    }
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=home,
        env=environment,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def run_script(
    name: str,
    script: str,
    setup: Mapping[str, Any],
    home: Path,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs the file `script` of ours, which gets `setup` as JSON and answers with a JSON file."""
    home.mkdir(parents=True, exist_ok=True)
    given, found = home / "setup.json", home / "found.json"
    given.write_text(json.dumps(setup))
    program = "node" if name == NODE else "python"
    run(name, [program, str(HERE / "scripts" / script), str(given), str(found)], home, variables)
    result: dict[str, Any] = json.loads(found.read_text())
    return result
