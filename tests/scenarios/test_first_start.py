"""Starts of an engine: with a cache of compiled code, without a home, without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_llm.utils import cache_folder

PREPARE = """
import json, sys, tempfile
from pathlib import Path
from hetero_llm import LLM, SamplingParams
from hetero_llm.utils import jit

def cache_mode(mode):
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    (folder / "lookahead_cache_config.json").write_text(json.dumps({"cache_mode": mode}))
    return {"use_lookahead": True, "lookahead_cache_config_dir": str(folder)}
"""
COUNT = """
NGRAMS = {"speculative_model": "[ngram]", "num_speculative_tokens": 4,
          "ngram_prompt_lookup_max": 3}
WORKER = {"speculative_model": "demo-draft", "num_speculative_tokens": 4, "cpu_draft_worker": True,
          "use_lookahead": True}
PROMPTS = ["def add(a, b):\\n    return", "class Node:\\n    def __init__(self, a, b, c):\\n"]
greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
sampled = SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=16, repetition_penalty=1.1)
beams = SamplingParams(use_beam_search=True, best_of=2, n=2, temperature=0, max_tokens=8)

for options in ({}, NGRAMS, *map(cache_mode, (0, 1, 3, 2)), WORKER):
    with LLM("demo", max_model_len=512, **options) as llm:
        before = jit.num_compiled()
        for params in (greedy, sampled, beams, greedy):
            llm.generate(PROMPTS, params, use_tqdm=False)
        late = {name for name, count in jit.num_compiled().items() if count > before.get(name, 0)}
        print(sorted(options), llm.backend, sum(before.values()), *late, sep="; ")
"""
ONE = """
import ctypes
# Without its capabilities even root cannot write where the modes forbid it.
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, nothing) == 0

with LLM("demo", max_model_len=256, use_lookahead=FULL, skip_tokenizer_init=not FULL) as llm:
    params, prompt = SamplingParams(temperature=0, max_tokens=4), "def f(" if FULL else [5, 6, 7]
    print(llm.backend, len(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids))
"""


def run(code: str, folder: Path, **variables: str) -> tuple[list[str], str]:
    """Lines of the output and the errors of a fresh interpreter; empty variables are unset. That
    the machine is busy is left out of the errors."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **variables}
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + code, str(folder)], text=True, capture_output=True,
        env={name: text for name, text in environment.items() if text}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines(keepends=True)
    errors = "".join(line for line in lines if "other programs use the cores" not in line)
    return done.stdout.splitlines(), errors


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines of `COUNT`, which also fills the usual cache."""
    return run(COUNT, tmp_path_factory.mktemp("modes"))[0]


def test_nothing_is_compiled_or_loaded_inside_a_request(counted: list[str]) -> None:
    assert len(counted) == 7
    for line in counted:
        _, backend, before, *late = line.split("; ")
        assert int(before) > 0 and not late, f"not compiled before the engine was ready: {line}"


@pytest.mark.parametrize("has_functions", [True, False])
def test_a_cache_that_can_only_be_read_needs_neither_home_nor_compiler(
    has_functions: bool, tmp_path: Path, counted: list[str]
) -> None:
    held, private = tmp_path / "cache", tmp_path / "private"
    held.mkdir()
    for path in cache_folder.write_folder().iterdir():
        if path.suffix == ".so" or has_functions:
            (held / path.name).symlink_to(path)
    held.chmod(0o555)
    private.mkdir()
    lines, errors = run(
        ONE.replace("FULL", str(has_functions)), tmp_path, HETERO_LLM_CACHE_DIR=str(held),
        HOME="/dev/null", XDG_CACHE_HOME="", PATH="/nowhere", TMPDIR=str(private),
    )  # fmt: skip
    assert lines == ["native 4"]
    written = [path for path in private.glob("hetero-llm-*/**/*") if path.is_file()]
    if has_functions:
        assert errors == "" and not written
    else:
        assert errors.count("\n") == 1 and "compiled code cannot be kept" in errors
        assert len(written) == 2  # what fills a step, and what walks its drafts
