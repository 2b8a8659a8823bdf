"""The bench of the IPEX backend: its turns and its table, and the runner that it compares with."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cpu_peers import method, transformers_eager
from bench.engine import ipex_decode


def test_ratios_are_those_of_a_quiet_turn() -> None:
    rates = {"transformers": iter((10, 9, 100, 20)), "ipex": iter((40, 90, 200, 60))}
    asked: list[str] = []

    def ask(name: str, kind: str) -> dict[str, float]:
        asked.append(name)
        return {"tok_s": next(rates[name]), "disturbed": len(asked) == 3}

    runners = {name: lambda kind, name=name: ask(name, kind) for name in rates}
    reads = iter((1.0, 2.0, 4.0, 3.0))
    measured = ipex_decode.take_turns(runners, ["decode1"], 4, lambda: next(reads))
    assert asked == ["transformers", "ipex"] * 4
    eager, ours = ipex_decode.summarize(*measured)
    assert (eager["over transformers"], eager["tok/s"]) == (1.0, 20.0)
    assert (ours["over transformers"], ours["middle half"]) == (3.0, "2.00 to 4.00")
    assert (ours["tok/s"], ours["slowest"], ours["fastest"], ours["read GB/s"]) == (
        60,
        40,
        200,
        2.5,
    )
    assert (ours["turns"], ours["quiet"]) == (3, 3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_transformers_takes_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipex_decode, "LEAST_S", 0.0)
    monkeypatch.setattr(method, "LONG_PROMPT", 40)
    make = [sys.executable, "-m", "bench.cpu_peers.make_checkpoint", "tiny", str(tmp_path)]
    subprocess.run(make, check=True, capture_output=True, cwd=Path(__file__).parents[3])
    generate = transformers_eager.generator(transformers_eager.load(tmp_path, threads=2))
    vocab_size = method.read_config(tmp_path)["vocab_size"]
    answers = io.StringIO()
    repetition = ipex_decode.Repetition(generate, vocab_size, patience=0.0)
    ipex_decode.serve(repetition, io.StringIO("prefill\ndecode1\n"), answers)
    ready, *figures = map(json.loads, answers.getvalue().splitlines())
    assert ready == {} and all(figure["tok_s"] > 0 for figure in figures) and len(figures) == 2
