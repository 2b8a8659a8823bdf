"""The files in deploy/ name commands and files that exist. Images are not built here."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib
from pathlib import Path

from hetero_llm.cli import build_parser

ROOT = Path(__file__).parents[1]


def parses(words: list[str]) -> bool:
    return build_parser().parse_args(words).run is not None


def test_the_unit_runs_a_command_that_there_is() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "deploy" / "hetero-llm.service")
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/hetero-llm") and parses(words)
    options = build_parser().parse_args(words)
    assert int(service["TimeoutStopSec"]) > options.shutdown_timeout
    assert service["KillMode"] == "mixed", "the engine's process is ended by the API's"


def test_the_image_runs_a_command_that_there_is() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    (command,) = (json.loads(line[4:]) for line in lines if line.startswith("CMD "))
    assert parses(command)
    for line in lines:
        if line.startswith("RUN hetero-llm "):
            assert parses(shlex.split(line)[2:]), line
        if line.startswith("COPY "):
            assert all((ROOT / name).exists() for name in line.split()[1:-1]), line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = re.search(r"\.\[([a-z,]+)\]", "\n".join(lines))
    assert wanted is not None
    assert set(wanted[1].split(",")) <= extras["optional-dependencies"].keys()
