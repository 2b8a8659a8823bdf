"""`EngineArgs` and `AsyncEngineArgs`: a dataclass over the argument table."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from typing import Any

import pytest

from hetero_llm import AsyncEngineArgs, ConfigError, EngineArgs
from hetero_llm.config.args import ENGINE_ARGS


def test_every_argument_is_a_field_with_its_default() -> None:
    args = EngineArgs("demo")
    for spec in ENGINE_ARGS:
        assert getattr(args, spec.name) == ("demo" if spec.name == "model" else spec.default)
    assert repr(args) == "EngineArgs(model='demo')"


def test_positions_and_names() -> None:
    args = EngineArgs("demo", "elsewhere", max_num_seqs=3)
    assert (args.model, args.tokenizer, args.max_num_seqs) == ("demo", "elsewhere", 3)
    assert AsyncEngineArgs(model="demo", seed=3).changed() == {"model": "demo", "seed": 3}


def test_arguments_of_vllms_front_end_are_taken() -> None:
    args = AsyncEngineArgs("demo", served_model_name=["a", "b"], disable_log_requests=True)
    assert (args.served_model_name, args.disable_log_requests) == (("a", "b"), True)
    assert EngineArgs("demo", served_model_name="a").served_model_name == ("a",)
    assert "served_model_name" not in args.resolved()


def test_asdict_gives_the_same_arguments(caplog: pytest.LogCaptureFixture) -> None:
    args = EngineArgs("demo", max_num_seqs=4, served_model_name="x")
    with caplog.at_level(logging.WARNING):
        assert EngineArgs(**dataclasses.asdict(args)) == args
    assert caplog.records == []  # obsolete arguments at their defaults need no notice
    assert dataclasses.replace(args, seed=7).seed == 7


def test_assigned_fields_are_checked_for_an_engine() -> None:
    args = EngineArgs("demo")
    args.max_num_seqs = 5
    assert args.resolved()["max_num_seqs"] == 5
    args.max_num_seqs = 0
    with pytest.raises(ConfigError, match="^max_num_seqs=0"):
        args.resolved()
    with pytest.raises(ConfigError, match="^max_modle_len=4: .*did you mean 'max_model_len'"):
        args.max_modle_len = 4


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"modle": "demo"}, "modle"),
        ({"model": "demo", "max_num_seqs": 0}, "max_num_seqs"),
        ({"model": "demo", "served_model_name": 5}, "served_model_name"),
        ({"model": "demo", "max_prompt_adapters": 0}, "max_prompt_adapters"),
        ({"max_num_seqs": 4}, "model"),
    ],
)
def test_wrong_engine_arguments(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AsyncEngineArgs(**values)
    assert caught.value.field == field


def test_arguments_from_a_command_line() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-prompts", type=int, default=3)
    assert AsyncEngineArgs.add_cli_args(parser) is parser
    words = "--model demo --max_num_seqs 3 --served-model-name b --disable-log-requests"
    found = AsyncEngineArgs.from_cli_args(parser.parse_args(words.split()))
    assert isinstance(found, AsyncEngineArgs)
    assert found.changed() == {"model": "demo", "max_num_seqs": 3}
    assert (found.served_model_name, found.disable_log_requests) == (("b",), True)


def test_flags_that_are_not_given_have_their_defaults() -> None:
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("Engine arguments")
    group.set_defaults(max_num_seqs=5)
    EngineArgs.add_cli_args(group)
    group.set_defaults(model="demo", runner="generate")
    args = parser.parse_args(["--dtype", "float32"])
    assert (args.tensor_parallel_size, args.enable_lora, args.served_model_name) == (1, False, None)
    made = EngineArgs(**vars(args))
    assert made.changed() == {
        "model": "demo", "dtype": "float32", "max_num_seqs": 5, "runner": "generate",
    }  # fmt: skip


@pytest.mark.parametrize("turned", [True, False])
def test_the_log_of_requests_by_vllms_name(turned: bool) -> None:
    assert AsyncEngineArgs("demo", enable_log_requests=turned).disable_log_requests is not turned
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    flag = "--enable-log-requests" if turned else "--no-enable-log-requests"
    found = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", "demo", flag]))
    assert found.disable_log_requests is not turned


def test_the_log_of_requests_by_two_names() -> None:
    with pytest.raises(ConfigError, match="^enable_log_requests=True: contradicts"):
        AsyncEngineArgs("demo", enable_log_requests=True, disable_log_requests=True)


def test_a_list_may_be_none() -> None:
    assert EngineArgs("demo", served_model_name=None).served_model_name == ()  # type: ignore[arg-type]


def test_batch_invariance_by_vllms_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert EngineArgs("demo").batch_invariant is True
    assert "VLLM_BATCH_INVARIANT" in caplog.text
    assert EngineArgs("demo", batch_invariant=False).batch_invariant is False
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert EngineArgs("demo").batch_invariant is False
