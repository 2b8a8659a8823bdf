"""`LLM` itself: prompt forms, progress, metrics, interruption, context manager."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import hetero_llm
from hetero_llm import LLM, EngineDeadError, SamplingParams
from hetero_llm.engine.input_processor import Prompt, parse_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("ab", None), [Prompt(text="ab")]),
        ((["a", "b"], None), [Prompt(text="a"), Prompt(text="b")]),
        (({"prompt": "a", "cache_salt": "s"}, None), [Prompt("a", None, "s")]),
        (([{"prompt_token_ids": [1, 2]}, "b"], None), [Prompt(None, [1, 2]), Prompt("b")]),
        ((None, [1, 2]), [Prompt(None, [1, 2])]),
        ((None, [[1, 2], [3]]), [Prompt(None, [1, 2]), Prompt(None, [3])]),
        ((["a", "b"], [[1], [2]]), [Prompt("a", [1]), Prompt("b", [2])]),
    ],
)
def test_prompt_forms(given: tuple, expected: list[Prompt]) -> None:
    assert parse_prompts(*given) == expected


def test_one_params_each_and_outputs_in_order(tiny: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 1, 3)]
    outputs = tiny.generate(["x", "yy", "zzz"], params, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["x", "yy", "zzz"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [5, 1, 3]
    assert all(o.finished for o in outputs)
    metrics = outputs[0].metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
    assert metrics.first_token_time < metrics.last_token_time <= metrics.finished_time


def test_the_bar_shows_tokens_per_second(tiny: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.generate("x", GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown and "toks/s" in shown


def test_metrics_count_what_was_done(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), dtype="float32", device="cpu", block_size=8) as llm:
        for _ in range(2):
            llm.generate(["x" * 20, "y" * 20], GREEDY, use_tqdm=False)
        metrics = llm.get_metrics()
    assert metrics["prompt_tokens"] == 80
    assert metrics["generation_tokens"] == 32
    assert metrics["prefix_cache_queries"] == 80
    assert metrics["prefix_cache_hits"] == 32
    assert metrics["num_requests_finished"] == 4
    assert metrics["num_preemptions"] == metrics["num_requests_running"] == 0
    assert all(isinstance(value, (int, float)) for value in metrics.values())


def test_ctrl_c_returns_what_there_is_and_the_engine_goes_on(tiny: LLM) -> None:
    def interrupt_late(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return logits

    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True,
                       logits_processors=[interrupt_late]),
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
    ]  # fmt: skip
    late, early = tiny.generate(["a", "b"], params, use_tqdm=False)
    assert late.outputs[0].finish_reason == "abort"
    assert len(late.outputs[0].token_ids) == 4
    assert early.outputs[0].finish_reason == "length"
    assert len(tiny.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failed_step_ends_the_engine_with_its_reason(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), dtype="float32", device="cpu")
    engine = llm.engine
    engine.runner.launch = lambda step: 1 / 0  # a bug of ours
    with pytest.raises(ZeroDivisionError):
        llm.generate("x", GREEDY, use_tqdm=False)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        llm.generate("x", GREEDY, use_tqdm=False)


def test_leaving_the_context_frees_the_engine(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), dtype="float32", device="cpu") as llm:
        assert llm.get_tokenizer() is not None
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x")


def test_the_package_names_its_version() -> None:
    assert hetero_llm.__version__.count(".") == 2
