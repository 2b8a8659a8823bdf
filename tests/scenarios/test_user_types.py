"""What type checkers see of the public API: mypy --strict and, where it is installed, pyright
in strict mode over a user's script, through an editable install of this project and a wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """\
import dataclasses

from hetero_llm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    SamplingParams,
    TokensPrompt,
)
from hetero_llm.sampling_params import RequestOutputKind
from hetero_llm.v1.metrics.reader import Counter


def offline() -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=16, stop=["x"])
    params.max_tokens = 8
    with LLM("demo", "elsewhere", max_num_seqs=4, device="cpu") as llm:
        outputs = llm.generate(["a", "b"], params)
        reveal_type(outputs)  # list[RequestOutput]
        llm.generate(TokensPrompt(prompt_token_ids=[1]), [params])
        llm.generate([1, 2], params.clone())
        llm.chat([{"role": "user", "content": "x"}], params, use_tqdm=False)
        for metric in llm.get_metrics():
            if isinstance(metric, Counter):
                print(metric.value + 1)
        beams = llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=4))
        reveal_type(beams[0].sequences[0].tokens)  # list[int]
        return [output.outputs[0].text for output in outputs]


def settings() -> None:
    args = EngineArgs("demo", max_num_seqs=4)
    reveal_type(args.max_num_seqs)  # int | None
    reveal_type(args.model)  # str
    args.max_num_seqs = 8
    reveal_type(dataclasses.replace(args, seed=1))  # EngineArgs
    args.max_num_seqs = "8"  # error
    args.max_num_sqes = 8  # error


def mistakes(llm: LLM) -> None:
    LLM("demo", max_num_seq=4)  # error
    LLM("demo", max_num_seqs="4")  # error
    EngineArgs("demo", max_num_seqs="4")  # error
    SamplingParams(temprature=1.0)  # error
    SamplingParams(max_tokens="8")  # error
    llm.generat("a")  # error
    llm.generate("a")[0].outputs[0].txt  # error


def steps() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs("demo", seed=1, served_model_name="x"))
    engine.add_request("id", "a", SamplingParams(output_kind=RequestOutputKind.DELTA))
    while engine.has_unfinished_requests():
        reveal_type(engine.step())  # list[RequestOutput]


async def stream() -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="demo"))
    async for output in engine.generate("a", SamplingParams(), "id"):
        reveal_type(output)  # RequestOutput
    await engine.check_health()
    reveal_type((await engine.get_model_config()).max_model_len)  # int
"""


EXPECTED = {
    number: line.partition("  # ")[2]
    for number, line in enumerate(SCRIPT.splitlines(), start=1)
    if "  # " in line
}
"""Line to the type that a checker reveals there, or `error`."""


def install(kind: str, folder: Path) -> Path:
    """The interpreter of a new environment in `folder` that has this project, `editable` or as a
    `wheel`, and nothing else."""
    project = folder / "project"
    (project / "docs").mkdir(parents=True)
    for name in ("pyproject.toml", "LICENSE", "docs/package_page.md"):
        (project / name).write_bytes((ROOT / name).read_bytes())
    (project / "hetero_llm").symlink_to(ROOT / "hetero_llm")
    build = f"from setuptools import build_meta as b; print(b.build_{kind}({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=project, capture_output=True, text=True, check=True
    )
    venv.create(folder / "env")
    (site,) = (folder / "env" / "lib").glob("python3*/site-packages")
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    return folder / "env" / "bin" / "python"


def check(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a checker in a folder with the script. The package is to be found through the
    installation alone."""
    (folder / "script.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if "PYTHONPATH" not in name}
    return subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def mypy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of both installs: they have the standard library's types in common."""
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_a_users_script_under_mypy_strict(kind: str, tmp_path: Path, mypy_cache: Path) -> None:
    pytest.importorskip("mypy")
    done = check(
        tmp_path, sys.executable, "-m", "mypy", "--strict", "--config-file", "",
        "--cache-dir", mypy_cache,
        "--python-executable", install(kind, tmp_path / "installed"), "script.py",
    )  # fmt: skip
    found = re.findall(r"^script\.py:(\d+): (error|note: Revealed type is \"(.*)\")", done.stdout,
                       flags=re.MULTILINE)  # fmt: skip
    said = {
        int(line): re.sub(r"[\w.]+\.(\w+)", r"\1", shown) or "error" for line, _, shown in found
    }
    assert said == EXPECTED, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("pyright") is None, reason="needs pyright (npm or pip)")
@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_a_users_script_under_pyright_strict(kind: str, tmp_path: Path) -> None:
    settings = {"include": ["script.py"], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    python = install(kind, tmp_path / "installed")
    done = check(tmp_path, "pyright", "--outputjson", "--pythonpath", python, "-p", tmp_path)
    said = {}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        revealed = re.fullmatch(r'Type of ".*" is "(.*)"', each["message"])
        said[each["range"]["start"]["line"] + 1] = revealed[1] if revealed else "error"
    assert said == EXPECTED, done.stdout + done.stderr
