"""What type checkers see of the public API: mypy --strict over a user's script, through an editable
install of this project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """\
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


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment into which this project is installed as editable."""
    folder = tmp_path_factory.mktemp("editable")
    project = folder / "project"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (project / name).write_bytes((ROOT / name).read_bytes())
    (project / "hetero_llm").symlink_to(ROOT / "hetero_llm")
    build = f"from setuptools import build_meta as b; print(b.build_editable({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=project, capture_output=True, text=True, check=True
    )
    venv.create(folder / "env")
    (site,) = (folder / "env" / "lib").glob("python3*/site-packages")
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    return folder / "env" / "bin" / "python"


def test_a_users_script_under_mypy_strict(editable: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # The package is to be found through the installation alone.
    clean = {name: value for name, value in os.environ.items() if "PYTHONPATH" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", editable, "script.py",
         "--cache-dir", tmp_path / "cache", "--config-file", ""],
        cwd=tmp_path, env=clean, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.findall(r"^script\.py:(\d+): (error|note: Revealed type is \"(.*)\")", done.stdout,
                       flags=re.MULTILINE)  # fmt: skip
    said = {
        int(line): re.sub(r"[\w.]+\.(\w+)", r"\1", shown) or "error" for line, _, shown in found
    }
    expected = {
        number: line.partition("  # ")[2]
        for number, line in enumerate(SCRIPT.splitlines(), start=1)
        if "  # " in line
    }
    assert said == expected, done.stdout + done.stderr
