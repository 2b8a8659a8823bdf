"""`hetero-llm completion`: the script of a shell, and what bash makes of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_llm import cli


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_name_commands_flags_and_choices(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason="needs hetero-llm[completion]")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("serve", "throughput", "max-model-len", "kv-cache-dtype", "write_through"):
        assert word in script
    for word in ("--tensor_parallel_size", "-l tensor_parallel_size"):
        assert word not in script, "one spelling of each flag"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="needs hetero-llm[completion]")
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "complete.bash"
    script.write_text(capsys.readouterr().out)
    for words, expected in (
        ("hetero-llm se", "serve"),
        ("hetero-llm serve --max-model", "--max-model-len"),
        ("hetero-llm bench th", "throughput"),
        ("hetero-llm serve --dtype bf", "bfloat16"),
    ):
        shell = (
            f"source {script}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
            "$(complete -p hetero-llm | grep -o -- '-F [^ ]*' | cut -d' ' -f2); "
            'echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
        assert expected in done.stdout.split(), done.stderr


def test_without_shtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "zsh"]) == 2
    assert "pip install 'hetero-llm[completion]'" in capsys.readouterr().err
