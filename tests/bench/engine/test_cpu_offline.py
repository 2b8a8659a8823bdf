"""The CPU benches measure what they say; sizes, the method, and one run of each on a tiny model."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.cpu_limits import ReadProbe, gemm_gflops
from bench.cpu_peers import make_checkpoint, method
from bench.engine import cpu_offline
from bench.shapes import (
    CPU_SHAPES,
    layer_parameters,
    linear_sizes,
    parameters,
    streamed_parameters,
    write_config,
)
from bench.speculation import draft_step
from hetero_llm import LLM, SamplingParams
from hetero_llm.models.layers import Linear
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import model_class

# Millions of parameters, and of bytes that a decode step reads in bfloat16.
KNOWN = {
    "S": (68.0, 86.9),
    "M": (134.5, 269.0),
    "L": (1100.0, 2069.0),
    "draft-68m": (68.0, 86.9),
}


@pytest.mark.parametrize("shape", list(KNOWN))
def test_shapes_have_the_stated_sizes(shape: str) -> None:
    config = CPU_SHAPES[shape]
    found = parameters(config) / 1e6, streamed_parameters(config) * 2 / 1e6
    assert found == pytest.approx(KNOWN[shape], abs=0.1)


@pytest.mark.parametrize("shape", list(CPU_SHAPES))
def test_sizes_are_the_models(shape: str, tmp_path: Path) -> None:
    folder = write_config(CPU_SHAPES[shape], tmp_path)
    config, settings = load_model_config(folder), method.read_config(folder)
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    layer, head = linear_sizes(settings)
    assert [tuple(m.weight.shape) for m in linears] == layer * config.num_layers + [head]
    assert sum(p.numel() for p in model.parameters()) == parameters(settings)
    in_layers = sum(m.weight.numel() for m in linears[:-1])
    assert in_layers == layer_parameters(settings)


def test_a_checkpoint_loads_and_has_tokens_for_every_id(tmp_path: Path) -> None:
    config = CPU_SHAPES["tiny"]
    write_config(CPU_SHAPES["tiny"], tmp_path)
    weights = make_checkpoint.random_weights(config, seed=0)
    make_checkpoint.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    make_checkpoint.plain_tokenizer(config["vocab_size"]).save_pretrained(tmp_path)
    again = make_checkpoint.random_weights(config, seed=0)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    with LLM(str(tmp_path), device="cpu", cpu_backend="torch", max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        (output,) = llm.generate("abc", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    assert len(make_checkpoint.plain_tokenizer(512)) == 512


def test_every_prompt_is_drawn_once() -> None:
    prompts = method.Prompts(512)
    drawn = [tuple(p) for p in prompts.draw(8, 32) + prompts.draw(8, 32)]
    assert len(set(drawn)) == 16
    assert all(256 <= i < 496 for p in drawn for i in p)


class FakeMachine:
    """Foreign processes use `foreign[k]` CPU seconds during the k-th repetition."""

    def __init__(self, foreign: list[float]) -> None:
        self.foreign = foreign
        self.busy = 0.0

    def call(self) -> None:
        self.busy += self.foreign.pop(0)

    def clock(self, patience_s: float, monkeypatch: pytest.MonkeyPatch) -> method.QuietClock:
        now = iter(range(1_000_000))
        monkeypatch.setattr(method.time, "perf_counter", lambda: float(next(now)))
        monkeypatch.setattr(method.time, "sleep", lambda seconds: None)
        return method.QuietClock(patience_s, busy=lambda: self.busy, own=lambda: 0.0)


def test_a_disturbed_repetition_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine([1.0, 1.0, 0.01])
    clock = machine.clock(1000.0, monkeypatch)
    assert clock.seconds(machine.call, 0.5) == 1.0
    assert (clock.clean, clock.disturbed) == (1, 0)
    assert not machine.foreign


def test_patience_ends_and_the_quietest_repetition_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine([1.0, 0.5, 0.75, 2.0, 2.0, 2.0])
    clock = machine.clock(5.0, monkeypatch)
    clock.seconds(machine.call, 0.5)
    assert (clock.clean, clock.disturbed) == (0, 1)
    assert clock.worst_foreign == 0.5
    left = len(machine.foreign)
    clock.seconds(machine.call, 0.5)  # nothing left to wait with
    assert len(machine.foreign) == left - 1


def test_rates_come_from_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that needs 1 ms a prompt token and 10 ms a step."""
    clock = method.QuietClock(0.0)
    spent: list[float] = []

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        spent.append(1e-3 * sum(map(len, prompts)) + 10e-3 * new_tokens)

    def seconds(call: Any, least_s: float) -> float:
        call()
        return spent[-1]

    monkeypatch.setattr(clock, "seconds", seconds)
    found = method.measure(generate, 512, work=list(method.WORK), repeats=2, clock=clock)
    assert found["prefill_tok_s"] == pytest.approx(512 / 0.522)
    assert found["decode1_tok_s"] == pytest.approx(100)
    assert found["decode8_tok_s"] == pytest.approx(800)
    assert found["rss_mb"] > 0 and found["startup_s"] > 0


def test_work_is_checked() -> None:
    assert method.work_list("decode8,prefill") == ["prefill", "decode8"]
    with pytest.raises(argparse.ArgumentTypeError, match="'decode2': one of prefill"):
        method.work_list("decode2")


def test_probes_measure_something() -> None:
    with ReadProbe(1_000_001, 2) as probe:
        assert probe.size == 1_000_448
        assert 0.1 < probe.gigabytes_per_s(tries=1) < 1e5
    assert gemm_gflops(64, 128, 1, tries=1) > 0


def test_fractions_and_ratios() -> None:
    config = CPU_SHAPES["L"]
    size = streamed_parameters(config) * 2.0
    limits = {"read_gb_s": 80.0, "gemm_gflops": 970.0}
    ours = {"decode1_tok_s": 30.0, "decode8_tok_s": 160.0, "prefill_tok_s": 400.0}
    peer = {"decode1_tok_s": 20.0, "decode8_tok_s": 80.0, "prefill_tok_s": 400.0}
    runners = [cpu_offline.Runner("ours", [], size), cpu_offline.Runner("other", [], size)]
    found = {"ours": [{**ours, "limits": limits}], "other": [{**peer, "limits": limits}]}
    rows = cpu_offline.summarize(found, runners, config, list(method.WORK))
    assert [row["ratio"] for row in rows] == [1.0, 1.5, 2.0]
    assert rows[0]["ours of limit"] == pytest.approx(0.799, abs=1e-3)
    assert rows[1]["ours of limit"] == pytest.approx(0.776, abs=1e-3)
    assert rows[2]["ours of limit"] == pytest.approx(0.517, abs=1e-3)


def test_processes_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    limits = iter(cpu_offline.Limits(float(i), 1.0) for i in range(5))

    class Machine:
        def limits(self) -> cpu_offline.Limits:
            calls.append("probe")
            return next(limits)

    monkeypatch.setattr(cpu_offline, "run", lambda runner: calls.append(runner.name) or {})
    runners = [cpu_offline.Runner(name, [], 1.0) for name in ("ours", "peer")]
    found = cpu_offline.measure(runners, Machine(), 2)  # type: ignore[arg-type]
    assert calls == ["probe", *["ours", "probe", "peer", "probe"] * 2]
    assert [f["limits"]["read_gb_s"] for f in found["peer"]] == [1.5, 3.5]


def test_a_failing_runner_says_why() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such engine')"]
    with pytest.raises(RuntimeError, match="peer: exit 1\nno such engine"):
        cpu_offline.run(cpu_offline.Runner("peer", command, 1.0))


def test_our_runner(tmp_path: Path) -> None:
    write_config(CPU_SHAPES["tiny"], tmp_path)
    command = [sys.executable, "-m", "bench.cpu_peers.hetero", str(tmp_path), "--threads", "1"]
    command += ["--work", "decode1", "--repeats", "1", "--patience", "0", "--backend", "torch"]
    root = Path(cpu_offline.__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["engine"].startswith("hetero-llm")
    assert figures["clean"] + figures["disturbed"] == 2
    assert "prefill_tok_s" not in figures


@pytest.mark.parametrize("kind", draft_step.KINDS)
def test_rows_of_a_draft_step(kind: str) -> None:
    work = draft_step.Work(kind, 4, 40)
    blocks = draft_step.blocks_for([1, 4], 40)
    tables = draft_step.block_tables(work, blocks)
    assert len(np.unique(tables)) == tables.size
    rows, draws = draft_step.step_arrays(work, tables)
    assert len(np.unique(rows.slot_mapping)) == 4
    assert rows.num_scheduled_tokens.sum() == 4 == len(draws.token_indices)
    assert (rows.num_computed_tokens == 39).all() and (rows.positions == 39).all()
    if kind == "branches":
        assert rows.ancestors.tolist() == [1, 2, 4, 8] and rows.is_tree.all()
        places = rows.num_computed_tokens[0] + np.arange(4)
        expected = tables[0][places // 16] * 16 + places % 16
    else:
        assert rows.ancestors.tolist() == [1] * 4 and not rows.is_tree.any()
        expected = tables[:, 2] * 16 + 39 % 16
    assert rows.slot_mapping.tolist() == expected.tolist()


def test_draft_step_table() -> None:
    bench = draft_step.Bench("tiny", [2], 40)
    works = [draft_step.Work(kind, 2, 40) for kind in draft_step.KINDS]
    wanted = draft_step.Wanted(3, 0.7)
    rows = draft_step.measure(bench, works, ["bf16", "int8"], threads=1, steps=3, wanted=wanted)
    assert [(r["weights"], r["kind"]) for r in rows] == [
        (weights, kind) for weights in ("bf16", "int8") for kind in draft_step.KINDS
    ]
    assert all(r["ours_ms"] > 0 and r["eager_ms"] / r["ours_ms"] == r["eager/ours"] for r in rows)
    assert all(r["noisy_ms"] > 0 for r in rows)


def test_a_draft_step_with_candidates() -> None:
    bench = draft_step.Bench("tiny", [2], 40)
    work, executor = draft_step.Work("batch", 2, 40), bench.executor("bf16", 1)
    names = [
        list(draft_step.our_steps(executor, work, bench.num_blocks, wanted))
        for wanted in (None, draft_step.Wanted(3, 0.0), draft_step.Wanted(3, 0.7))
    ]
    assert names == [["ours_ms"], ["ours_ms", "candidates_ms"], ["ours_ms", "noisy_ms"]]
