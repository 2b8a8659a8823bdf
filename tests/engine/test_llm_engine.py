"""`LLMEngine`: steps that the caller drives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_llm import (
    LLM,
    ConfigError,
    DuplicateRequestError,
    EngineArgs,
    EngineDeadError,
    LLMEngine,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[LLMEngine]:
    args = EngineArgs(str(tiny_folder), dtype="float32", device="cpu", block_size=8)
    args.served_model_name = ("tiny",)
    engine = LLMEngine.from_engine_args(args)
    yield engine
    engine.shutdown()


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_requests_run_step_by_step(engine: LLMEngine, tiny: LLM) -> None:
    delta = SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    engine.add_request("a", "xy", GREEDY)
    engine.add_request("b", [5, 6], delta)
    assert engine.get_num_unfinished_requests() == 2
    delta.max_tokens = 50  # for later requests
    outputs = run(engine)
    expected = tiny.generate(["xy", [5, 6]], [GREEDY, GREEDY], use_tqdm=False)
    cumulative = [o.outputs[0].token_ids for o in outputs if o.request_id == "a"]
    assert [len(ids) for ids in cumulative] == [1, 2, 3, 4, 5]
    assert cumulative[-1] == expected[0].outputs[0].token_ids
    deltas = [o.outputs[0].token_ids for o in outputs if o.request_id == "b"]
    assert sum(deltas, []) == expected[1].outputs[0].token_ids[:3]
    assert engine.step() == []


def test_an_aborted_request_has_no_further_output(engine: LLMEngine) -> None:
    for name in ("first", "second", "third"):
        engine.add_request(name, "x", GREEDY)
    engine.step()
    engine.abort_request("first")
    engine.abort_request(["second", "unknown"])
    assert {output.request_id for output in run(engine)} == {"third"}
    engine.add_request("first", "x", GREEDY)  # the id is free again
    assert run(engine)[-1].finished


def test_mistakes_are_named(engine: LLMEngine) -> None:
    engine.add_request("same", "x", GREEDY)
    with pytest.raises(DuplicateRequestError, match="same"):
        engine.add_request("same", "x", GREEDY)
    with pytest.raises(RequestError, match="^request_id="):
        engine.add_request("", "x", GREEDY)
    with pytest.raises(RequestError, match="^prompt="):
        engine.add_request("other", 5, GREEDY)
    with pytest.raises(ConfigError, match="^priority=1: .*not available yet"):
        engine.add_request("other", "x", GREEDY, priority=1)
    assert engine.get_num_unfinished_requests() == 1
    run(engine)


def test_facts_about_the_engine(engine: LLMEngine, tiny_folder: Path) -> None:
    config = engine.get_model_config()
    assert (config.model, config.served_model_name) == (str(tiny_folder), "tiny")
    assert (config.dtype, config.get_vocab_size()) == ("float32", 259)
    assert config.max_model_len > 0
    assert engine.get_tokenizer().decode([67, 68]) == "ab"
    engine.check_health()
    assert engine.metrics()["num_requests_running"] == 0
    assert {metric.labels["model_name"] for metric in engine.get_metrics()} == {"tiny"}
    engine.reset_prefix_cache()


def test_arguments_and_calls_of_vllm(engine: LLMEngine) -> None:
    with pytest.raises(ConfigError, match="^tokenization_kwargs="):
        engine.add_request("a", "x", GREEDY, tokenization_kwargs={"max_length": 1})
    with pytest.raises(ConfigError, match="^trace_headers="):
        engine.add_request("a", "x", GREEDY, trace_headers={"a": "b"})  # type: ignore[arg-type]
    engine.add_request("a", "x", GREEDY)
    assert engine.reset_prefix_cache(reset_running_requests=True) is True  # beside the request
    engine.reset_mm_cache()
    engine.reset_encoder_cache()
    engine.abort_request(["a"], internal=False)
    assert engine.model_config is engine.get_model_config()
    assert engine.tokenizer is engine.get_tokenizer()
    with pytest.raises(AttributeError, match="LLMEngine.sleep: a sleep level is not available"):
        engine.sleep()


def test_a_closed_engine_says_so(tiny_folder: Path) -> None:
    engine = LLMEngine({"model": str(tiny_folder), "dtype": "float32", "device": "cpu"})
    engine.shutdown()
    engine.shutdown()
    for call in (engine.step, engine.check_health, engine.get_metrics):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()
