"""The wheel with prebuilt libraries, installed where there is no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.build_wheels import build

RUN = """
from hetero_llm import LLM, SamplingParams
with LLM("demo", max_model_len=256) as llm:
    params = SamplingParams(temperature=0, max_tokens=4)
    print(llm.backend, len(llm.generate("def f(", params, use_tqdm=False)[0].outputs[0].token_ids))
"""


@pytest.mark.faults
def test_an_engine_runs_from_the_wheel_without_a_compiler(tmp_path: Path) -> None:
    wheel = build(tmp_path / "dist")
    assert "-py3-none-manylinux_2_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "site")
    names = {name.partition("prebuilt/")[2].rpartition("-")[0] for name in libraries}
    assert names == {"kernels", "rings", "kv-copier", "pool"}
    environment = {
        **os.environ, "PATH": "/nowhere", "PYTHONPATH": str(tmp_path / "site"),
        "HETERO_LLM_CACHE_DIR": str(tmp_path / "cache"), "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
    for words in (("-c", RUN), ("-m", "hetero_llm.bridge.build")):
        done = subprocess.run(
            [sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        if words[0] == "-c":
            assert done.stdout == "native 4\n"
        else:
            lines = done.stdout.splitlines()
            assert len(lines) == 3 and all("/hetero_llm/prebuilt/" in line for line in lines)
    assert not list((tmp_path / "cache").glob("*.so"))
