"""What the bench asks of llama-bench, and how it pairs the figures of both engines."""

from __future__ import annotations

import argparse
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from bench.engine.llama_cpp_experts import (
    Run,
    llama_decode,
    llama_prefill,
    our_arguments,
    rows_of,
    runs_of,
)
from bench.shapes import MOE_SHAPES

CONFIG = MOE_SHAPES["tiny-qwen3-moe"]
# Answers as llama-bench does, with 10 tokens/s for each thread less the experts' layers.
_PROGRAM = """#!/usr/bin/env python3
import json, sys
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
numbers = lambda name: [int(word) for word in args.get(name, "0").split(",")]
rows = [
    {"n_threads": t, "n_depth": d, "n_prompt": p, "repack": bool(r), "build_commit": "abc",
     "avg_ts": 10.0 * t - int(args["-ncmoe"]) - r}
    for t in numbers("-t") for d in numbers("-d") for p in numbers("-p")
    for r in numbers("--repack")
]
print(json.dumps(rows))
"""


@pytest.fixture
def args(tmp_path: Path) -> argparse.Namespace:
    program = tmp_path / "llama-bench"
    program.write_text(_PROGRAM)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return argparse.Namespace(
        file=tmp_path / "m.gguf", llama_bench=program, threads=[2, 3], depths=[0, 8], steps=4,
        prompts=[16, 32], resident=[0.0, 0.5], popularity=["uniform", "zipf"], cpu_only=True,
    )  # fmt: skip


def test_the_best_number_of_threads(args: argparse.Namespace) -> None:
    found = llama_decode(args, CONFIG, 0.5, 60)
    assert found["decode"] == {0: 28.0, 8: 28.0} and found["threads"] == {0: 3, 8: 3}
    assert found["decode_by"][8] == {2: 18.0, 3: 28.0} and found["build"]["build_commit"] == "abc"
    prompts = llama_prefill(args, CONFIG, 0.0, 60)
    assert prompts["prefill"] == {16: 26.0, 32: 26.0}
    assert prompts["prefill_by"][32] == {"False": 26.0, "True": 25.0}


def test_a_program_that_fails_says_why(args: argparse.Namespace) -> None:
    args.llama_bench.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match=r"exit 3\nno such model"):
        llama_decode(args, CONFIG, 0.0, 60)


def test_what_runs(args: argparse.Namespace) -> None:
    assert runs_of(args) == [
        Run("llama.cpp", 0.0), Run("ours", 0.0), Run("llama.cpp", 0.5), Run("ours", 0.5),
        Run("ours", 0.5, "zipf"), Run("llama.cpp prompts", 0.0), Run("llama.cpp prompts", 0.5),
        Run("ours", None),
    ]  # fmt: skip
    args.llama_bench, args.cpu_only, args.resident = None, False, [1.0]
    assert runs_of(args) == [Run("ours", 1.0)]


def test_arguments_of_a_share() -> None:
    assert our_arguments(CONFIG, 0.0) == {"moe_cpu_experts": "all"}
    each = 3 * 128 * 256 * 18 // 32
    assert our_arguments(CONFIG, 0.5) == {"moe_expert_memory": 0.5 * 4 * 32 * each / 2**30}


def test_rows_pair_the_same_share() -> None:
    ours: dict[str, Any] = {
        "engine": "ours", "resident": 0.5, "popularity": "zipf", "hit": 0.9,
        "decode": {"8": 30.0}, "prefill": {"16": 60.0},
    }  # fmt: skip
    theirs = {"engine": "llama.cpp", "decode": {8: 10.0}, "threads": {8: 3}}
    runs = [
        json.loads(json.dumps(ours)),
        {**theirs, "resident": 0.0, "decode": {8: 1.0}},
        {**theirs, "resident": 0.5},
        {"engine": "llama.cpp prompts", "resident": 0.5, "prefill": {16: 20.0}},
        {**ours, "resident": None, "hit": None},
    ]
    decode, prefill, alone, _ = rows_of(runs)
    assert (decode["over"], decode["threads"], decode["hit"]) == (3.0, 3, 0.9)
    assert (prefill["over"], prefill["threads"]) == (3.0, "-")
    assert (alone["resident"], alone["over"], alone["hit"]) == ("CPU alone", "-", "-")
