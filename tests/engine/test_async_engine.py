"""`AsyncLLMEngine` against `LLM` on the demo model: same tokens, same errors, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench.engine.async_overhead import figures, offline, online
from hetero_llm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    CompletionOutput,
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    OverloadedError,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingError,
    SamplingParams,
    StructuredOutputsParams,
)
from hetero_llm.engine.finish_rate import FinishRate
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.engine.processes import output_stream
from tests.helpers.async_tools import idle_metrics, read, until

pytestmark = pytest.mark.usefixtures("forked_engines")

ARGS = {
    "model": "demo",
    "device": "cpu",
    "dtype": "float32",
    "num_gpu_blocks_override": 512,
    "max_num_seqs": 16,
    "cpu_threads": 1,
}
MOST_QUEUED = 4
DELTA, CUMULATIVE, FINAL = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)
CODE = "def add(a, b):"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# seconds of work, of which the tests wait for a few steps
ENDLESS = SamplingParams(n=12, seed=1, max_tokens=None, ignore_eos=True, output_kind=DELTA)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLMEngine]:
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(**ARGS), served_names=("demo", "alias"), max_queued_requests=MOST_QUEUED
    )
    yield engine
    asyncio.run(engine.shutdown(0))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**ARGS) as llm:
        yield llm


MIXED: list[tuple[Any, SamplingParams]] = [
    (CODE, GREEDY),
    ("class Node:", replace(GREEDY, output_kind=DELTA)),
    ("import os\n", replace(GREEDY, output_kind=FINAL)),
    ({"prompt_token_ids": [300, 301, 302]}, replace(GREEDY, output_kind=DELTA)),
    ({"prompt": CODE, "cache_salt": "other"}, replace(GREEDY, max_tokens=1, output_kind=DELTA)),
    (CODE, SamplingParams(n=2, seed=5, max_tokens=9, output_kind=DELTA)),
    (CODE, SamplingParams(n=3, seed=6, max_tokens=9, logprobs=2)),
    (CODE, SamplingParams(n=1, best_of=3, seed=7, max_tokens=6, output_kind=DELTA)),
    ("for i in", SamplingParams(seed=8, temperature=0.7, top_p=0.9, top_k=40, max_tokens=20)),
    (CODE, replace(GREEDY, stop="\n\n", max_tokens=40, output_kind=DELTA)),
    (CODE, replace(GREEDY, stop=["return a"], include_stop_str_in_output=True, max_tokens=30)),
    (CODE, replace(GREEDY, logprobs=3, prompt_logprobs=2, output_kind=DELTA)),
    (CODE, replace(GREEDY, prompt_logprobs=1, output_kind=FINAL)),
    ("x = ", SamplingParams(temperature=0, use_beam_search=True, best_of=3, n=2, max_tokens=5)),
    (CODE, replace(GREEDY, repetition_penalty=1.3, bad_words=["return"], output_kind=DELTA)),
    (CODE, replace(GREEDY, detokenize=False, stop_token_ids=[71], output_kind=DELTA)),
]


def joined(outputs: list[RequestOutput], kind: RequestOutputKind) -> list[CompletionOutput]:
    """What a user has of each sequence after the last output."""
    if kind is not DELTA:
        return outputs[-1].outputs
    found: dict[int, CompletionOutput] = {}
    for output in outputs:
        for one in output.outputs:
            before = found.get(one.index)
            if before is not None:
                logprobs = None if one.logprobs is None else [*before.logprobs, *one.logprobs]
                ids = before.token_ids + one.token_ids
                one = replace(one, text=before.text + one.text, token_ids=ids, logprobs=logprobs)
            found[one.index] = one
    return list(found.values())


def assert_same_logprobs(ours: Any, theirs: Any) -> None:
    """Equal but for the last bits, which depend on the number of rows in a step."""
    assert (ours is None) == (theirs is None)
    for mine, other in zip(ours or (), theirs or (), strict=True):
        assert (mine is None) == (other is None)
        for token, entry in (mine or {}).items():
            assert entry.decoded_token == other[token].decoded_token
            assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-3)


def test_sixteen_streams_are_what_llm_generates(engine: AsyncLLMEngine, llm: LLM) -> None:
    async def run() -> list[list[RequestOutput]]:
        tasks = [read(engine, f"mixed {i}", *MIXED[i]) for i in range(len(MIXED))]
        return await asyncio.gather(*tasks)

    streams = asyncio.run(run())
    params = [params for _, params in MIXED]
    expected = llm.generate([prompt for prompt, _ in MIXED], params, use_tqdm=False)
    for index, (outputs, wanted) in enumerate(zip(streams, expected, strict=True)):
        last = outputs[-1]
        assert [one.finished for one in outputs] == [False] * (len(outputs) - 1) + [True]
        assert last.request_id == f"mixed {index}"
        assert (last.prompt, last.prompt_token_ids) == (wanted.prompt, wanted.prompt_token_ids)
        assert_same_logprobs(last.prompt_logprobs, wanted.prompt_logprobs)
        ours = joined(outputs, params[index].output_kind)
        for mine, other in zip(ours, wanted.outputs, strict=True):
            assert_same_logprobs(mine.logprobs, other.logprobs)
            assert (mine.cumulative_logprob is None) == (other.cumulative_logprob is None)
            same = {"logprobs": None, "cumulative_logprob": None}
            assert replace(mine, **same) == replace(other, **same)
        assert last.metrics is not None and last.metrics.finished_time is not None
        assert last.metrics.arrival_time <= last.metrics.first_token_time
    assert params[0].output_kind is CUMULATIVE and len(streams[0]) == GREEDY.max_tokens


def test_cumulative_outputs_grow_and_belong_to_the_reader(engine: AsyncLLMEngine) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=8, ignore_eos=True, logprobs=0)
    outputs = asyncio.run(read(engine, "grow", CODE, params))
    lengths = [[len(one.token_ids) for one in output.outputs] for output in outputs]
    assert lengths == [[k, k] for k in range(1, 9)]
    for before, after in zip(outputs, outputs[1:], strict=False):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.text.startswith(old.text)
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
            assert len(old.logprobs) == len(old.token_ids)


def test_closing_a_stream_aborts_the_request(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        before = await idle_metrics(engine)
        async with contextlib.aclosing(engine.generate(CODE, ENDLESS, "closed")) as stream:
            async for _ in stream:
                break
        steps = engine.stats().num_steps
        task = asyncio.create_task(read(engine, "cancelled", CODE, ENDLESS))
        await until(lambda: engine.stats().num_steps > steps)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        after = await idle_metrics(engine)
        assert after["num_requests_finished"] == before["num_requests_finished"] + 2
        assert after["generation_tokens"] < before["generation_tokens"] + 2 * 12 * 2000

    asyncio.run(run())


def test_abort_ends_the_stream_with_its_reason(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        await engine.abort("nobody")
        outputs = []
        async for output in engine.generate(CODE, replace(ENDLESS, n=2), "ended"):
            outputs.append(output)
            if len(outputs) == 3:
                await engine.abort("ended")
        assert [one.finish_reason for one in outputs[-1].outputs] == ["abort", "abort"]
        # before the engine has heard of it: the prompt is still being tokenized
        early = engine.generate("x = 1\n" * 300, ENDLESS, "early")
        first = asyncio.ensure_future(anext(early))
        await asyncio.sleep(0)
        await engine.abort("early")
        assert (await first).outputs[0].finish_reason == "abort"
        assert [output async for output in early] == []
        await idle_metrics(engine)

    asyncio.run(run())


def test_an_id_is_taken_while_its_request_runs(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        stream = engine.generate(CODE, ENDLESS, "twice")
        await anext(stream)
        with pytest.raises(DuplicateRequestError, match="^request_id='twice': "):
            await read(engine, "twice", CODE, GREEDY)
        await stream.aclose()
        # what is still on its way for the first one does not reach the second
        (*_, last) = await read(engine, "twice", CODE, GREEDY)
        assert len(last.outputs[0].token_ids) == GREEDY.max_tokens
        await idle_metrics(engine)

    asyncio.run(run())


def test_an_id_is_free_with_the_last_output(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        final = replace(GREEDY, output_kind=FINAL)
        first = engine.generate(CODE, final, "same")
        output = await anext(first)
        assert output.finished
        assert len(await read(engine, "same", CODE, final)) == 1
        await first.aclose()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ("", {}),
        (5, {}),
        (Prompt(token_ids=[4096]), {}),
        (Prompt(token_ids=[1, "a"]), {}),
        (Prompt(token_ids=[7] * 5000), {}),
        ("word " * 4000, {}),
        ("\ud800", {}),
        ({"prompt": "x", "cache_salt": ""}, {}),
        ({"prompt": "x", "image": 1}, {}),
        ("x", {"logprobs": 21}),
        ("x", {"stop_token_ids": [4096]}),
        ("x", {"n": 17}),  # found by the engine alone
        # Their requests have begun, and maybe ended, in the engine when this is found.
        ("x", {"structured_outputs": StructuredOutputsParams(regex="(a")}),
        ("x", {"structured_outputs": StructuredOutputsParams(regex="((a{99}){100}){100}")}),
        ("x", {"structured_outputs": StructuredOutputsParams(grammar="start: a")}),
        ("x", {"structured_outputs": StructuredOutputsParams(json={"not": {"type": "null"}})}),
    ],
)
def test_mistakes_are_those_of_llm(
    engine: AsyncLLMEngine, llm: LLM, prompt: Any, fields: dict[str, Any]
) -> None:
    params = replace(GREEDY, **fields)
    given = prompt
    if isinstance(prompt, Prompt):
        given = {"prompt_token_ids": prompt.token_ids}
    with pytest.raises(RequestError) as theirs:
        llm.generate(given, params, use_tqdm=False)
    with pytest.raises(RequestError) as ours:
        asyncio.run(read(engine, "wrong", prompt, params))
    assert type(ours.value) is type(theirs.value)
    assert ours.value.field in (theirs.value.field, "prompt")
    if not isinstance(prompt, int):
        assert str(ours.value) == str(theirs.value)
    asyncio.run(idle_metrics(engine))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logits_processors": [lambda ids, logits: logits]}, "logits_processors"),
        ({"top_k": 1 << 70}, "top_k"),
        ({"max_tokens": 1 << 64}, "max_tokens"),
    ],
)
def test_what_cannot_travel(engine: AsyncLLMEngine, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(SamplingError) as caught:
        asyncio.run(read(engine, "stays", CODE, replace(GREEDY, **fields)))
    assert caught.value.field == field
    assert engine.stats().queue == 0


@pytest.mark.parametrize("request_id", ["", None, 5])
def test_a_wrong_request_id(engine: AsyncLLMEngine, request_id: Any) -> None:
    with pytest.raises(RequestError, match="^request_id="):
        asyncio.run(read(engine, request_id, CODE, GREEDY))


def test_too_many_requests_are_refused(
    engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]  # a request finished an hour before the others come
    monkeypatch.setattr(engine, "finish_rate", FinishRate(lambda: now[0]))

    async def run() -> None:
        params = replace(ENDLESS, n=1, output_kind=FINAL)
        room = ARGS["max_num_seqs"] + MOST_QUEUED
        engine.finish_rate.note()
        now[0] += 3600.0
        tasks = [asyncio.create_task(read(engine, f"load {i}", CODE, params)) for i in range(room)]
        await asyncio.sleep(0)
        assert engine.stats().queue == room
        with pytest.raises(OverloadedError, match=f"max_queued_requests={MOST_QUEUED}") as caught:
            await read(engine, "one more", CODE, GREEDY)
        assert caught.value.retry_after == 1.0  # nothing has finished since
        await engine.abort("load 0")
        await until(lambda: engine.stats().queue == room - 1)
        await until(lambda: engine.stats().metrics["num_requests_waiting"] < MOST_QUEUED)
        again = asyncio.create_task(read(engine, "one more", CODE, GREEDY))
        for i in range(1, room):
            await engine.abort(f"load {i}")
        assert (await again)[-1].finished
        reasons = {(await task)[-1].outputs[0].finish_reason for task in tasks}
        assert reasons == {"abort"}
        await idle_metrics(engine)

    asyncio.run(run())


def test_a_slow_reader_gets_merged_outputs(
    engine: AsyncLLMEngine, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = 16
    monkeypatch.setattr(output_stream, "MOST_KEPT", kept)
    params = replace(GREEDY, max_tokens=3 * kept, logprobs=1, output_kind=DELTA)

    async def run() -> list[RequestOutput]:
        slow = engine.generate(CODE, params, "slow")
        outputs = [await anext(slow)]
        quick = await read(engine, "quick", CODE, params)  # not held up by the slow one
        assert len(quick) == params.max_tokens
        await until(lambda: engine.num_unfinished == 0)
        return outputs + [output async for output in slow]

    outputs = asyncio.run(run())
    assert len(outputs) == kept + 1
    (mine,) = joined(outputs, DELTA)
    ((wanted,),) = (one.outputs for one in llm.generate(CODE, params, use_tqdm=False))
    assert (mine.text, mine.token_ids) == (wanted.text, wanted.token_ids)
    assert_same_logprobs(mine.logprobs, wanted.logprobs)


def test_calls_and_figures(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        info = engine.info
        assert info.served_names == ("demo", "alias")
        assert (info.max_model_len, info.vocab_size, info.num_blocks) == (2048, 4096, 512)
        assert (info.device, info.dtype, info.block_size) == ("cpu", "float32", 16)
        assert set(info.started_seconds) == {"import", "load", "total"}
        long = "x = 1\n" * 40
        await engine.reset_prefix_cache()
        hits = []
        for name in ("cold", "warm", "reset"):
            if name == "reset":
                await engine.reset_prefix_cache()
            (*_, last) = await read(engine, name, long, GREEDY)
            hits.append(last.num_cached_tokens)
        assert hits[0] == hits[2] == 0 < hits[1]
        with pytest.raises(ConfigError, match="^use_lookahead=False: .*no lookahead cache"):
            await engine.save_lookahead_cache("nowhere")
        engine.check_health()
        # heartbeats come while nothing runs, too
        steps = (await engine.metrics())["num_steps"]
        await until(lambda: engine.stats().num_steps == steps)
        assert engine.stats().last_step_age < engine.step_timeout

    asyncio.run(run())


def test_the_bench_counts_what_it_says(engine: AsyncLLMEngine, llm: LLM) -> None:
    for generate in (
        lambda prompts, tokens: offline(llm, prompts, tokens),
        lambda prompts, tokens: asyncio.run(online(engine, prompts, tokens)),
    ):
        rates, first = figures(generate, [1, 2], 3)
        assert len(rates) == 2 and min(*rates, first) > 0


def test_figures_can_be_asked_for_in_another_thread(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        await read(engine, "here", CODE, GREEDY)
        await asyncio.to_thread(engine.check_health)
        assert (await asyncio.to_thread(engine.stats)).queue == 0

    asyncio.run(run())


def test_one_event_loop_at_a_time(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        await read(engine, "first loop", CODE, GREEDY)
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(read(engine, "second loop", CODE, GREEDY)))

    asyncio.run(run())


def test_the_names_of_vllms_engine(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        await engine.check_health()
        assert (engine.is_running, engine.errored, engine.is_stopped) == (True, False, False)
        assert (await engine.get_tokenizer()).decode([70]) == engine.tokenizer.hf.decode([70])
        config = await engine.get_model_config()
        assert (config.model, config.served_model_name) == ("demo", "demo")
        assert (config.max_model_len, config.get_vocab_size()) == (2048, 4096)
        (*_, named) = [
            output
            async for output in engine.generate(
                prompt=CODE, sampling_params=GREEDY, request_id="named", lora_request=None
            )
        ]
        started = await engine.add_request("added", CODE, GREEDY)
        with pytest.raises(DuplicateRequestError):
            await engine.add_request("added", CODE, GREEDY)
        (*_, added) = [output async for output in started]
        assert added.outputs == named.outputs
        ids = [5, 6, 7]
        as_ids = [one async for one in engine.generate(ids, GREEDY, "ids")]
        assert as_ids[-1].prompt_token_ids == ids
        metrics = {metric.name: metric for metric in await engine.get_metrics()}
        assert metrics["vllm:num_requests_running"].value == 0
        assert metrics["vllm:num_requests_running"].labels["model_name"] == "demo"
        await idle_metrics(engine)

    asyncio.run(run())


def test_a_running_request_does_not_see_assignments(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        started = [await engine.add_request(f"assigned {i}", CODE, params) for i in range(2)]
        params.max_tokens = 9
        for stream in started:
            (*_, last) = [output async for output in stream]
            assert len(last.outputs[0].token_ids) == 4
        (*_, last) = await read(engine, "later", CODE, params)
        assert len(last.outputs[0].token_ids) == 9

    asyncio.run(run())


def test_several_requests_are_aborted_at_once(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        streams = [await engine.add_request(f"end {i}", CODE, ENDLESS) for i in range(2)]
        await engine.abort(["end 0", "nobody", "end 1"])
        for stream in streams:
            (*_, last) = [output async for output in stream]
            assert {one.finish_reason for one in last.outputs} == {"abort"}
        await idle_metrics(engine)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"priority": 1}, "priority"),
        ({"trace_headers": {"a": "b"}}, "trace_headers"),
        ({"tokenization_kwargs": {"a": 1}}, "tokenization_kwargs"),
        ({"data_parallel_rank": 0}, "data_parallel_rank"),
    ],
)
def test_what_vllm_takes_and_this_engine_not_yet(
    engine: AsyncLLMEngine, fields: dict[str, Any], field: str
) -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match=f"^{field}=.*not available yet"):
            await anext(engine.generate(CODE, GREEDY, "later", **fields))
        assert engine.stats().queue == 0

    asyncio.run(run())


def test_arguments_and_calls_of_vllm(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        empty: dict[str, Any] = {"tokenization_kwargs": {}, "data_parallel_rank": None}
        async for output in engine.generate(CODE, GREEDY, "empty", **empty):
            last = output
        assert last.finished
        await engine.abort(["no", "such"], internal=True)
        reset = await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert reset is True
        await engine.reset_mm_cache()
        await engine.reset_encoder_cache()
        assert engine.model_config is await engine.get_model_config()
        with pytest.raises(AttributeError, match="pause_generation: a pause of all requests is"):
            engine.pause_generation()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "value"), [("max_queued_requests", -1), ("max_queued_requests", True),
                        ("step_timeout", 0.0), ("step_timeout", float("nan"))]
)  # fmt: skip
def test_wrong_arguments_of_the_client(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        AsyncLLMEngine({"model": "demo"}, **{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(("name", "value"), [("start_engine_loop", False), ("stat_loggers", [1])])
def test_what_from_engine_args_cannot_do(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        AsyncLLMEngine.from_engine_args(AsyncEngineArgs("demo"), **{name: value})


def test_arguments_show_what_was_changed() -> None:
    assert repr(AsyncEngineArgs(model="demo", seed=3)) == "AsyncEngineArgs(model='demo', seed=3)"


def test_shutdown_drains_then_ends(engine: AsyncLLMEngine) -> None:
    """The last test of this engine."""

    async def run() -> None:
        short = asyncio.create_task(read(engine, "short", CODE, GREEDY))
        endless = asyncio.create_task(read(engine, "endless", CODE, ENDLESS))
        await asyncio.sleep(0)
        assert engine.stats().queue == 2
        draining = asyncio.create_task(engine.shutdown(1000.0))
        assert (await short)[-1].finished
        with pytest.raises(EngineDeadError, match="being shut down"):
            await read(engine, "late", CODE, GREEDY)
        assert not draining.done()
        await engine.shutdown(0.0)
        with pytest.raises(EngineDeadError, match="was shut down"):
            await endless
        await draining
        assert engine.process.popen.returncode == 0
        for call in (engine.metrics(), read(engine, "later", CODE, GREEDY)):
            with pytest.raises(EngineDeadError, match="shut down"):
                await call
        with pytest.raises(EngineDeadError, match="shut down"):
            engine.check_health()
        assert engine.errored and engine.is_stopped
        assert "shut down" in str(engine.dead_error)
        engine.shutdown()  # by vLLM's name: at once, and not awaited

    asyncio.run(run())
