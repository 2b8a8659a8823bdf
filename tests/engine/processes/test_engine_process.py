"""The engine process's loop on a fake runner, in this process, and what travels over the socket."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import pytest

from hetero_llm import (
    ConfigError,
    EngineDeadError,
    HeteroLLMError,
    ModelLoadError,
    PromptError,
    RequestError,
    RequestOutputKind,
    SamplingError,
    SamplingParams,
    SnapshotError,
)
from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.images import MOST_PROMPT_BYTES, PromptImage, PromptImages
from hetero_llm.core.lora import AdapterRef, LoRARequest
from hetero_llm.core.outputs import RequestMetrics
from hetero_llm.core.pooling import Finish, PoolingInput, PoolingRequest, PoolingResult
from hetero_llm.core.request import Request
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.factory import BuiltEngine
from hetero_llm.engine.inputs.input_processor import InputProcessor
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.engine.processes import engine_process, messages
from hetero_llm.engine.processes.engine_launcher import launch
from hetero_llm.engine.processes.engine_process import EngineLoop
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.prefix_cache import PrefixCache, hash_root, token_bytes
from hetero_llm.scheduler.scheduler import Scheduler
from hetero_llm.utils.message_socket import MessageSocket

DELTA = RequestOutputKind.DELTA
TOKEN = 7
CONTEXT = 64
MOST_UNSENT = 1 << 14  # bytes
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)


class FakeRunner:
    """Samples the same token for every sequence; fails at step `fails_at`."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.fails_at = -1

    def launch(self, step: SchedulerOutput) -> SchedulerOutput:
        return step

    def finish(self, pending: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise ZeroDivisionError("on purpose")
        return ModelRunnerOutput([TOKEN] * int(pending.num_samples.sum()), None, {}, {})


@dataclass
class Other:
    """The API process's side: a socket to a loop that runs in a thread of this process."""

    socket: MessageSocket
    end: MessageSocket  # the loop's
    runner: FakeRunner
    thread: Thread
    codes: list[int]
    params: SamplingParams = field(default_factory=PARAMS.clone)

    def post(self, message: messages.Message) -> None:
        self.socket.send(messages.encode(message))

    def add(self, key: str, token_ids: list[int], **fields: Any) -> None:
        params = messages.params_to_wire(self.params, DELTA) | fields
        limit = params.get("max_tokens")
        most = CONTEXT if limit is None else len(token_ids) + limit
        packed, root = token_bytes(token_ids), hash_root(())
        self.post(messages.AddRequest(key, packed, params, 0, most, root))

    def messages(self) -> Iterator[messages.Message]:
        """All messages but heartbeats."""
        while not self.socket.closed:
            assert select.select([self.socket], [], [], 60)[0], "no sign of life"
            self.socket.flush()
            for data in self.socket.receive():
                message = messages.decode_from_engine(data)
                if not isinstance(message, messages.Heartbeat):
                    yield message

    def exit_code(self) -> int:
        self.thread.join(60)
        return self.codes[0]


@pytest.fixture
def other() -> Iterator[Other]:
    ours, theirs = socket.socketpair()
    runner = FakeRunner()
    scheduler = Scheduler(SchedulerConfig(4, 64, 64, True, 8), BlockManager(32, 8, PrefixCache()))
    inputs = InputProcessor(
        None, vocab_size=50, max_model_len=CONTEXT, eos_ids=(2,), max_logprobs=20, seed=0
    )
    engine = Engine(inputs, scheduler, runner, OutputProcessor(None, scheduler.stop_sequence))
    end = MessageSocket(theirs)
    built = BuiltEngine(engine, None, 64, 32, "cpu", "f", "torch", None)
    loop = EngineLoop(end, built, most_unsent=MOST_UNSENT)
    codes: list[int] = []

    def run() -> None:
        codes.append(loop.run())
        engine_process.flush_and_close(end)

    thread = Thread(target=run, daemon=True)
    with closing(MessageSocket(ours)) as connection:
        thread.start()
        yield Other(connection, end, runner, thread, codes)
    thread.join(60)
    assert codes, "the loop has to end when the other side goes"


def outputs_of(other: Other, key: str) -> list[messages.Output]:
    """Up to the last one of a request."""
    found = []
    for message in other.messages():
        assert isinstance(message, messages.StepOutputs)
        found += [one for one in message.outputs if one.key == key]
        if found and found[-1].finished:
            break
    return found


def test_deltas_of_a_request(other: Other) -> None:
    other.add("a", [3, 4])
    outputs = outputs_of(other, "a")
    assert [one.outputs[0].token_ids for one in outputs] == [[TOKEN]] * 5
    assert [one.finished for one in outputs] == [False] * 4 + [True]
    assert [one.metrics is not None for one in outputs] == [True, False, False, False, True]


def test_a_bad_request_changes_nothing_for_others(other: Other) -> None:
    other.add("good", [3])
    other.add("long", [3] * 256)  # with its output it needs more KV blocks than there are
    other.add("wrong", [3], temperature=-1)
    other.post(messages.Abort("nobody"))
    errors, tokens = {}, 0
    for message in other.messages():
        if isinstance(message, messages.RequestFailed):
            errors[message.key] = messages.error_from_wire(message.error)
        elif isinstance(message, messages.StepOutputs):
            tokens += len(message.outputs[0].outputs[0].token_ids)
        if tokens == 5 and len(errors) == 2:
            break
    assert isinstance(errors["long"], PromptError) and isinstance(errors["wrong"], SamplingError)
    assert str(errors["wrong"]) == "temperature=-1: must be at least 0"


def test_a_request_that_cannot_be_read_fails_alone(other: Other) -> None:
    other.add("good", [3])
    strange = ["AddRequest", "strange", b"", {}, 0, 3, b"", [], [], None, 0, [],
               {"items": [[0, 1, None, {"x": ["<f8", [1], b"12345678"]}]], "key": ""}]  # fmt: skip
    other.socket.send(msgspec.msgpack.encode(strange))
    inputs = [{"token_ids": ["|O", [1], b"12345678"]}]
    pool = {"key": "pool", "inputs": inputs, "finish": {}}
    other.socket.send(msgspec.msgpack.encode(["AddPooling", pool]))
    errors, tokens = {}, 0
    for message in other.messages():
        if isinstance(message, messages.RequestFailed):
            errors[message.key] = str(messages.error_from_wire(message.error))
        elif isinstance(message, messages.StepOutputs):
            tokens += len(message.outputs[0].outputs[0].token_ids)
        if tokens == 5 and len(errors) == 2:
            break
    assert errors.keys() == {"strange", "pool"}
    assert "ValidationError in the engine's process" in errors["strange"]
    assert "an array of '|O'" in errors["pool"]


def test_only_requests_have_a_key() -> None:
    for data in (b"", b"\xc1", msgspec.msgpack.encode(["Abort", "a"])):
        assert messages.key_of_request(data) is None


def test_a_failed_step_ends_the_process(other: Other) -> None:
    other.runner.fails_at = 3
    other.add("a", [3])
    *before, last = other.messages()
    assert len(before) == 2
    assert last == messages.Dead("ZeroDivisionError: on purpose")
    assert other.exit_code() == engine_process.EXIT_DEAD


def test_it_ends_when_told(other: Other) -> None:
    other.add("a", [3], max_tokens=None)
    other.post(messages.Shutdown())
    assert other.exit_code() == 0


def test_it_ends_when_the_other_side_has_gone(other: Other) -> None:
    other.add("a", [3], max_tokens=None)
    other.socket.close()
    assert other.exit_code() == 0


def test_steps_pause_while_outputs_are_not_read(other: Other) -> None:
    limit, count = MOST_UNSENT, 200
    other.params = replace(PARAMS, max_tokens=60)
    for number in range(count):  # far more output than a socket holds
        other.add(str(number), [3])
    while other.end.num_unsent < limit:
        time.sleep(0.001)
    steps = other.runner.num_steps
    time.sleep(0.3)  # heartbeats would come in this time, and steps if they did not pause
    assert other.runner.num_steps <= steps + 1
    assert other.end.num_unsent < limit + 1000
    finished = 0
    for message in other.messages():
        assert isinstance(message, messages.StepOutputs)
        finished += sum(one.finished for one in message.outputs)
        if finished == count:
            break
    assert finished == count


def test_calls(other: Other) -> None:
    other.post(messages.Call(1, "metrics", []))
    other.post(messages.Call(2, "save_lookahead_cache", ["x"]))
    other.post(messages.Call(3, "metrics", ["too many arguments"]))
    replies = other.messages()
    first, second, third = (next(replies) for _ in range(3))
    assert first.number == 1 and first.result["num_requests_running"] == 0
    assert isinstance(messages.error_from_wire(second.error), ConfigError)
    assert "TypeError" in str(messages.error_from_wire(third.error))


def test_heartbeats_come_when_nothing_runs(other: Other) -> None:
    beats = 0
    while beats < 3:
        assert select.select([other.socket], [], [], 60)[0]
        for data in other.socket.receive():
            beat = messages.decode_from_engine(data)
            assert isinstance(beat, messages.Heartbeat) and beat.metrics["num_steps"] == 0
            beats += 1


# -- messages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(n=2, best_of=3, seed=(1 << 64) - 1, stop=["a", "é"], logprobs=-1),
        SamplingParams(logit_bias={"5": 1, 7: -2.5}, allowed_token_ids=[3], bad_words=("x",)),
        SamplingParams(use_beam_search=True, best_of=2, temperature=0, early_stopping="never"),
        SamplingParams(temperature=np.float64(0.5), max_tokens=None, num_speculative_tokens=0),
        SamplingParams(output_kind=DELTA, truncate_prompt_tokens=4, stop_token_ids={1}),
    ],
)
def test_parameters_travel(params: SamplingParams) -> None:
    fields = messages.params_to_wire(params, params.output_kind)
    sent = messages.AddRequest("1", token_bytes([2]), fields, 0, 3, hash_root(()))
    received = messages.decode_to_engine(messages.encode(sent))
    assert isinstance(received, messages.AddRequest)
    assert messages.params_from_wire(received.params) == params


def request_with(array: np.ndarray) -> Request:
    """A request with an image."""
    images = PromptImages((PromptImage(0, 1, None, {"pixels": array}),), "")
    return Request("1", None, [2], SamplingParams(), 0, frozenset(), frozenset(), 3, b"",
                   RequestMetrics(0.0), images=images, packed_prompt=token_bytes([2]))  # fmt: skip


@pytest.mark.parametrize("dtype", ["<f4", "<i4", "<i8", "|u1"])
def test_arrays_travel(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    for one in (array, array.T, array[:, ::2]):  # the last two are not contiguous
        sent = messages.request_to_wire("1", request_with(one))
        received = messages.decode_to_engine(messages.encode(sent))
        assert isinstance(received, messages.AddRequest) and received.images is not None
        found = received.images.items[0].arrays["pixels"]
        assert found.dtype == one.dtype and np.array_equal(found, one)


@pytest.mark.parametrize("dtype", ["<f8", "<f2", ">f4", "|b1", "|O", "<c8", "<M8[s]"])
def test_arrays_of_other_types_are_refused_before_they_leave(dtype: str) -> None:
    array = np.zeros(2, dtype)
    with pytest.raises(PromptError, match=r"pixels='.*': arrays of this type cannot go to"):
        messages.request_to_wire("1", request_with(array))
    with pytest.raises(TypeError, match="an array of .* cannot travel"):
        messages.encode(messages.Call(1, "x", [array]))


def test_arrays_that_are_too_large_are_refused_before_they_leave() -> None:
    array = np.broadcast_to(np.float32(0), MOST_PROMPT_BYTES // 4 + 1)
    with pytest.raises(PromptError, match=r"at most 1073741824 bytes of arrays may come with"):
        messages.request_to_wire("1", request_with(array))


def test_grammars_and_adapters_travel() -> None:
    grammar = Grammar("text", (3, 4), 5)
    adapter = AdapterRef(LoRARequest("name", 2, "/path", base_model_name="base"), "ab", 8)
    sent = messages.AddRequest("1", b"", {}, 0, 3, b"", grammar=grammar, adapter=adapter)
    received = messages.decode_to_engine(messages.encode(sent))
    assert isinstance(received, messages.AddRequest)
    assert received.grammar == grammar and received.adapter == adapter


def test_inputs_to_pool_and_their_values_travel() -> None:
    ids, types = np.array([1, 2, 3], np.int32), np.array([0, 1, 1], np.uint8)
    inputs = [PoolingInput(ids, types), PoolingInput(ids[:1])]
    sent = messages.AddPooling(PoolingRequest("1", inputs, Finish(4, True, "sigmoid")))
    received = messages.decode_to_engine(messages.encode(sent))
    assert isinstance(received, messages.AddPooling)
    assert received.request.key == "1" and received.request.finish == sent.request.finish
    first, second = received.request.inputs
    assert np.array_equal(first.token_ids, ids) and first.token_ids.dtype == np.int32
    assert first.types is not None and np.array_equal(first.types, types)
    assert second.token_ids.tolist() == [1] and second.types is None
    values = [np.array([0.5, -1.0], np.float32), np.array([2.0], np.float32)]
    result = PoolingResult("1", values, 1.5, "wrong")
    answer = messages.decode_from_engine(messages.encode(messages.PooledOutputs([result])))
    assert isinstance(answer, messages.PooledOutputs)
    (found,) = answer.outputs
    assert (found.key, found.scheduled, found.error) == ("1", 1.5, "wrong")
    assert [one.tolist() for one in found.values] == [one.tolist() for one in values]


@pytest.mark.parametrize(
    "error",
    [
        RequestError("f", 1 << 80, "r"),
        PromptError("prompt", "x" * 1000, "is long"),
        PromptError("prompt", "\ud800", "is no text"),
        SamplingError("n", None, "must be an integer"),
        SamplingError("stop", ["a"], "r"),
        ConfigError("seed", -1.5, "must be"),
        ModelLoadError("no such folder"),
        SnapshotError("/a", "damaged"),
        EngineDeadError("dead"),
    ],
)
def test_errors_travel(error: HeteroLLMError) -> None:
    sent = messages.RequestFailed("1", messages.error_to_wire(error))
    received = messages.decode_from_engine(messages.encode(sent))
    assert isinstance(received, messages.RequestFailed)
    again = messages.error_from_wire(received.error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert getattr(again, "reason", None) == getattr(error, "reason", None)


def test_other_peoples_errors_are_named() -> None:
    error = messages.error_from_wire(messages.error_to_wire(KeyError("k")))
    assert type(error) is HeteroLLMError and str(error).startswith("KeyError in the engine's")


def test_numbers_of_numpy_become_plain() -> None:
    sent = messages.Heartbeat({"a": np.float32(0.5), "b": np.int64(3), "c": 1})
    received = messages.decode_from_engine(messages.encode(sent))
    assert received == messages.Heartbeat({"a": 0.5, "b": 3.0, "c": 1.0})


def test_nothing_but_plain_data_travels() -> None:
    with pytest.raises(TypeError, match="object cannot travel"):
        messages.encode(messages.Call(1, "x", [object()]))


def test_a_process_that_ends_at_once_says_how() -> None:
    process = launch({"model": "demo"})
    process.popen.kill()
    with pytest.raises(EngineDeadError, match="did not start: .* signal 9"):
        process.wait_until_ready()
    process.kill()


def test_the_process_begins_before_torch_is_loaded() -> None:
    """Loading takes seconds, in which it would outlive a parent that ends."""
    code = (
        "import sys, hetero_llm.engine.processes.engine_process; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
