"""The bench of the IPEX backend: its table, and the runner that it compares with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import ipex_decode
from bench.cpu_peers import transformers_eager
from bench.cpu_shapes import read_config


def test_ratios_are_those_of_neighbours() -> None:
    def rounds(*rates: float) -> list[dict[str, Any]]:
        return [{"decode1_tok_s": rate, "disturbed": 1} for rate in rates]

    found = {"transformers": rounds(10.0, 100.0, 20.0), "ipex": rounds(40.0, 200.0, 60.0)}
    eager, ours = ipex_decode.summarize(found, ["decode1"])
    assert (eager["over transformers"], eager["least"], eager["tok/s"]) == (1.0, 1.0, 20.0)
    assert (ours["over transformers"], ours["least"], ours["tok/s"]) == (3.0, 2.0, 60.0)
    assert (ours["slowest"], ours["fastest"], ours["disturbed"]) == (40.0, 200.0, 3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_transformers_runner_generates_as_many_tokens_as_asked_for(tmp_path: Path) -> None:
    make = [sys.executable, "-m", "bench.cpu_peers.make_checkpoint", "tiny", str(tmp_path)]
    subprocess.run(make, check=True, capture_output=True, cwd=Path(__file__).parents[2])
    generate = transformers_eager.generator(transformers_eager.load(tmp_path, threads=2))
    vocab = read_config(tmp_path)["vocab_size"]
    generate([[3, 4, 5], [6, 7, vocab - 1]], 4)  # asserts the length itself
