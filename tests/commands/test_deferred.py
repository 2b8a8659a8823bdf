from __future__ import annotations

import subprocess
import sys

import pytest

from hetero_llm import cli
from hetero_llm.commands.deferred import DeferredParser


@pytest.mark.parametrize("arguments", [[], ["--help"], ["doctor", "--help"]])
def test_commands_are_not_loaded_before_they_run(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom hetero_llm import cli\n"
        f"sys.argv[1:] = {arguments}\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "print([n for n in sys.modules if n.startswith(('hetero_llm.commands.',"
        " 'hetero_llm.bench_client', 'aiohttp', 'asyncio'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    known = ["console", "deferred", *arguments[:-1]]
    assert done.stdout.splitlines()[-1] == str([f"hetero_llm.commands.{name}" for name in known])


def test_a_parser_is_filled_once() -> None:
    filled = []
    parser = DeferredParser()

    def fill(found: DeferredParser) -> None:
        filled.append(found)
        found.add_argument("--flag")

    parser.fill = fill
    assert parser.parse_args(["--flag", "a"]).flag == "a"
    assert parser.parse_args(["--flag", "b"]).flag == "b"
    assert filled == [parser]


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("bench", "chat", "complete"):
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, "--help"])
        assert stopped.value.code == 0
        assert f"usage: hetero-llm {command}" in capsys.readouterr().out
