"""A model whose layers are cut into stages, one process each, on a CPU: the tokens of one process
that runs all layers.

In float32 a stage computes the same bits as the whole model does. There is one engine with ranks at
a time: they are the default group of torch.distributed.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hetero_llm import (
    LLM,
    ConfigError,
    EngineArgs,
    EngineDeadError,
    LLMEngine,
    RequestOutput,
    SamplingError,
)
from hetero_llm.core.errors import RankDeadError
from hetero_llm.distributed.rank_processes import RankProcesses
from tests.helpers.draft_traffic import EVERYTHING, VOCAB, Bench, make_draft, make_model
from tests.helpers.drafters import Siblings
from tests.models.tiny import make_tiny_checkpoint
from tests.scenarios.test_tensor_parallel import (
    ADAPTERS,
    GREEDY,
    REQUESTS,
    SAMPLED,
    TIGHT,
    adapters_of,
    check_same,
    run,
    with_adapters,
)

pytestmark = pytest.mark.usefixtures("forked_engines", "free_drafts")

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def tiny(folder: Path, family: str, variant: str, layers: int) -> Path:
    return make_tiny_checkpoint(
        folder, family, variant, with_tokenizer=True, layers=layers, changes=SIZES
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("pp") / "llama", "llama", "gqa", 3)


@pytest.fixture(scope="class")
def llm(folder: Path) -> Iterator[LLM]:
    """Two stages, with few KV blocks."""
    options = {**TIGHT, **ADAPTERS, "num_gpu_blocks_override": 40}
    with LLM(str(folder), **options, pipeline_parallel_size=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[RequestOutput]:
    with LLM(str(folder), **TIGHT) as llm:
        return run(llm)


class TestTwoStages:
    def test_tokens_of_one_process(self, llm: LLM, expected: list[RequestOutput]) -> None:
        check_same(run(llm), expected)
        metrics = llm.metrics()
        assert metrics["num_preemptions"] > 0
        assert metrics["num_steps_ahead"] > metrics["num_steps"] // 2, "two steps are in flight"

    def test_again_with_cached_prefixes(self, llm: LLM, expected: list[RequestOutput]) -> None:
        before = llm.metrics()["prefix_cache_hits"]
        check_same(run(llm), expected)
        assert llm.metrics()["prefix_cache_hits"] > before

    def test_one_request_alone_has_no_step_ahead(self, llm: LLM) -> None:
        before = llm.metrics()
        (output,) = llm.generate([[9, 8]], replace(GREEDY, max_tokens=5), use_tqdm=False)
        after = llm.metrics()
        assert len(output.outputs[0].token_ids) == 5
        assert after["num_steps"] - before["num_steps"] == 5
        assert after["num_steps_ahead"] == before["num_steps_ahead"]

    def test_three_adapters_take_turns_in_two_slots(
        self, llm: LLM, folder: Path, tmp_path: Path
    ) -> None:
        adapters = adapters_of(tmp_path, folder)
        with LLM(str(folder), **TIGHT, **ADAPTERS) as one:
            expected = with_adapters(one, adapters)
        assert len(set(map(tuple, expected))) == len(expected)
        assert with_adapters(llm, adapters) == expected

    def test_functions_of_the_user_are_refused(self, llm: LLM) -> None:
        params = replace(GREEDY, logits_processors=[lambda _, logits: logits])
        with pytest.raises(SamplingError, match=r"^logits_processors=.*pipeline_parallel_size"):
            llm.generate("x", params)


@pytest.fixture(scope="class")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two stages that verify draft trees, for requests of every kind."""
    kinds = {kind: params for kind, params in EVERYTHING.items() if kind != "processor"}
    model = make_model(tmp_path_factory.mktemp("drafts") / "llama")
    bench = Bench(
        model, 7, kinds, cpu_backend="torch", batch_invariant=True,
        ranks={"pipeline_parallel_size": 2},
    )  # fmt: skip
    yield bench
    bench.engine.shut_down()


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens' KV the first stage has moved, each time."""
    moved: list[int] = []
    move_kv = RankProcesses.move_kv

    def counted(self: RankProcesses, moves: np.ndarray) -> None:
        moved.append(moves.shape[1])
        move_kv(self, moves)

    monkeypatch.setattr(RankProcesses, "move_kv", counted)
    return moved


class TestDrafts:
    def test_tokens_of_one_process_without_drafts(self, bench: Bench, moves: list[int]) -> None:
        different, counts = bench.serve(Siblings(bench.record, VOCAB))
        assert different == []
        assert counts["num_steps_ahead"] > 0, "chunks run beside drafts"
        assert counts["num_accepted_tokens"] > 50 and sum(moves) > 20
        bench.engine.scheduler.check_integrity()

    def test_gaps_in_the_first_stage_are_seen(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The negative control: it leaves the KV of accepted nodes where it is."""
        monkeypatch.setattr(RankProcesses, "move_kv", lambda self, moves: None)
        different, _ = bench.serve(Siblings(bench.record, VOCAB))
        assert different


def test_the_lookahead_cache_with_a_draft_worker(
    folder: Path, expected: list[RequestOutput], tmp_path: Path
) -> None:
    drafts = {
        "use_lookahead": True, "num_speculative_tokens": 5, "cpu_draft_worker": True,
        "speculative_model": str(make_draft(folder, tmp_path / "draft")), "draft_threads": 1,
    }  # fmt: skip
    with LLM(
        str(folder), **TIGHT, **drafts, num_gpu_blocks_override=40, pipeline_parallel_size=2
    ) as llm:
        for _ in range(2):
            check_same(run(llm), expected)
        metrics = llm.metrics()
        assert metrics["num_preemptions"] > 0
        assert metrics["spec_decode_num_accepted_tokens"] > 20


def step_to_the_end(engine: LLMEngine, chosen: list[int]) -> list[RequestOutput]:
    """The outputs of these `REQUESTS`, beside two more that are aborted meanwhile."""
    for number in chosen:
        engine.add_request(str(number), *REQUESTS[number])
    for number in range(2):
        engine.add_request(f"aborted {number}", "some words", SAMPLED)
    found: dict[str, RequestOutput] = {}
    for count in range(10_000):
        found |= {one.request_id: one for one in engine.step() if one.finished}
        if count == 5:
            engine.abort_request(["aborted 0", "aborted 1"])
        if not engine.has_unfinished_requests():
            break
    assert set(found) == set(map(str, chosen))
    return [found[str(number)] for number in chosen]


@pytest.mark.parametrize(
    ("family", "variant", "sizes"),
    [
        ("mixtral", "window_tied", {"pipeline_parallel_size": 3}),
        ("llama", "tied", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
    ids=["three_stages", "two_stages_of_two_ranks"],
)
def test_steps_with_aborts_and_then_a_dead_rank(
    tmp_path: Path, family: str, variant: str, sizes: dict[str, int],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = tiny(tmp_path / family, family, variant, 3)
    chosen = [1, 3, 4, 6, 7, 9, 10]
    with LLM(str(folder), **TIGHT) as llm:
        prompts, params = zip(*(REQUESTS[number] for number in chosen), strict=True)
        expected = llm.generate(list(prompts), list(params), use_tqdm=False)
    with caplog.at_level(logging.INFO):
        engine = LLMEngine(EngineArgs(str(folder), **TIGHT, **sizes))
    ranks = [one for one in psutil.Process().children() if one.name() == "rank_process"]
    (line,) = [line for line in caplog.messages if " ranks" in line and "is process" in line]
    assert all(f"{rank} is process {one.pid}" in line for rank, one in enumerate(ranks, 1))
    check_same(step_to_the_end(engine, chosen), expected)

    engine.add_request("endless", "x", replace(GREEDY, max_tokens=200))
    os.kill(ranks[-1].pid, signal.SIGKILL)
    with pytest.raises((RankDeadError, EngineDeadError)) as caught:
        while True:
            engine.step()
    words = f"rank {len(ranks)} (process {ranks[-1].pid}) was ended by signal 9 (SIGKILL)"
    assert words in str(caught.value) and "\n" not in str(caught.value)
    engine.shutdown()
    assert psutil.wait_procs(ranks, 60)[1] == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline_parallel_size": 4}, r"^pipeline_parallel_size=4: the model has 3 layers"),
        (
            {"enable_prompt_adapter": True, "max_prompt_adapter_token": 8},
            r"^enable_prompt_adapter=True: .*pipeline_parallel_size",
        ),
        (
            {"quantization_param_path": "scales.json", "kv_cache_dtype": "fp8"},
            r"^quantization_param_path='scales.json': .*pipeline_parallel_size",
        ),
        ({"model_impl": "transformers"}, r"^pipeline_parallel_size=2: LlamaForCausalLM runs by"),
        ({"cpu_backend": "ipex"}, r"^cpu_backend='ipex': .*pipeline_parallel_size"),
    ],
)
def test_what_is_not_combined_is_one_line(
    folder: Path, given: dict[str, Any], message: str
) -> None:
    before = len(psutil.Process().children())
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(str(folder), **{**TIGHT, "pipeline_parallel_size": 2, **given})
    assert "\n" not in str(caught.value)
    assert len(psutil.Process().children()) == before, "nothing was started"
