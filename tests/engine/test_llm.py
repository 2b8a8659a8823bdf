"""`LLM` itself: prompt forms, progress, metrics, interruption, context manager."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tqdm import tqdm

import hetero_llm
from hetero_llm import (
    LLM,
    BeamSearchParams,
    ConfigError,
    EngineArgs,
    EngineDeadError,
    PoolingError,
    PromptError,
    SamplingError,
    SamplingParams,
)
from hetero_llm.engine.inputs.input_processor import Prompt, parse_prompts
from hetero_llm.models.read_config import load_model_config
from hetero_llm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

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
        (([1, 2], None), [Prompt(None, [1, 2])]),
        (([[1, 2], [3], "b"], None), [Prompt(None, [1, 2]), Prompt(None, [3]), Prompt("b")]),
        ((np.array([1, 2]), None), [Prompt(None, [1, 2])]),
        ((np.array([[1, 2], [3, 4]]), None), [Prompt(None, [1, 2]), Prompt(None, [3, 4])]),
        (({"prompt_token_ids": torch.tensor([1, 2])}, None), [Prompt(None, [1, 2])]),
        ((None, np.array([1, 2])), [Prompt(None, [1, 2])]),
        (
            ({"prompt": "a", "mm_processor_kwargs": {}, "multi_modal_uuids": None}, None),
            [Prompt(text="a")],
        ),
    ],
)
def test_prompt_forms(given: tuple, expected: list[Prompt]) -> None:
    assert parse_prompts(*given) == expected


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt": "a", "mm_processor_kwargs": {"x": 1}}, "another treatment of images"),
        ({"prompt_embeds": torch.zeros(2, 4)}, "a prompt of embeddings is"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, "a prompt of an encoder is"),
    ],
)
def test_prompts_that_are_not_available_yet(prompt: dict[str, Any], reason: str) -> None:
    with pytest.raises(PromptError, match=f"{reason}.* not available yet") as caught:
        parse_prompts(["x", prompt])
    assert caught.value.prompt_index == 1


def test_arguments_and_calls_of_vllm(tiny: LLM, tiny_folder: Path) -> None:
    shared: dict[str, Any] = {"use_tqdm": False, "tokenization_kwargs": None}
    (output,) = tiny.generate("ab", GREEDY, priority=[0], **shared)
    chat = [{"role": "user", "content": "ab"}]
    template = "{{ messages[0].content }}"
    (answer,) = tiny.chat(chat, GREEDY, chat_template=template, mm_processor_kwargs={}, **shared)
    assert answer.outputs[0].token_ids == output.outputs[0].token_ids
    with pytest.raises(ConfigError, match="^tokenization_kwargs="):
        tiny.generate("ab", GREEDY, tokenization_kwargs={"max_length": 2})
    with pytest.raises(ConfigError, match="^mm_processor_kwargs="):
        tiny.chat(chat, GREEDY, chat_template=template, mm_processor_kwargs={"x": 1})
    (beams,) = tiny.beam_search(["ab"], BeamSearchParams(2, 3), None, False, 4)
    assert len(beams.sequences) == 2
    assert tiny.reset_prefix_cache(reset_running_requests=True, reset_connector=True) is True
    tiny.reset_mm_cache()
    tiny.reset_encoder_cache()
    assert tiny.supported_tasks == ("generate",)
    assert tiny.model_config.model == str(tiny_folder)


def test_the_engine_inside_by_vllms_name(tiny: LLM) -> None:
    (expected,) = tiny.generate("ab", GREEDY, use_tqdm=False)
    engine = tiny.llm_engine
    assert engine is tiny.llm_engine
    assert engine.model_config.max_model_len == tiny.model_config.max_model_len
    assert engine.tokenizer is tiny.get_tokenizer()
    engine.add_request("mine", "ab", GREEDY, tokenization_kwargs={}, trace_headers=None)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids


def test_made_of_engine_arguments(tiny_folder: Path) -> None:
    args = EngineArgs(str(tiny_folder), dtype="float32", device="cpu", served_model_name="mine")
    with LLM.from_engine_args(args) as llm:
        assert llm.model_config.served_model_name == "mine"
        held = llm.llm_engine
    with pytest.raises(EngineDeadError):
        llm.llm_engine  # noqa: B018
    assert not held.has_unfinished_requests()


def test_other_names_and_forms_of_prompts(tiny: LLM) -> None:
    def run(*args: Any, **kwargs: Any) -> list[list[int]]:
        outputs = tiny.generate(*args, sampling_params=GREEDY, use_tqdm=False, **kwargs)
        return [output.outputs[0].token_ids for output in outputs]

    expected = run({"prompt_token_ids": [5, 6]})
    assert run([5, 6]) == run(inputs=[5, 6]) == run([[5, 6]]) == run(np.array([5, 6])) == expected
    assert run(inputs=["x", [5, 6]])[1:] == expected
    assert run(inputs="x", priority=[0]) == run("x")
    with pytest.raises(PromptError, match="^inputs='x': is another name of prompts"):
        tiny.generate("x", inputs="x")
    with pytest.raises(ConfigError, match="^priority=.*not available yet"):
        tiny.generate("x", priority=[1])
    with pytest.raises(PromptError, match="^prompt_token_ids=True"):  # one prompt: no index
        tiny.generate([1, True])


def test_beam_search_returns_vllms_outputs(tiny: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=4, length_penalty=0.5, ignore_eos=True)
    same = SamplingParams(
        n=3, use_beam_search=True, temperature=0, max_tokens=4, length_penalty=0.5, logprobs=0,
        ignore_eos=True,
    )  # fmt: skip
    found = tiny.beam_search([{"prompt": "ab"}, {"prompt_token_ids": [5, 6]}], params)
    wanted = tiny.generate(["ab", [5, 6]], same, use_tqdm=False)
    for mine, other in zip(found, wanted, strict=True):
        assert len(mine.sequences) == 3
        for beam, completion in zip(mine.sequences, other.outputs, strict=True):
            assert beam.tokens == other.prompt_token_ids + completion.token_ids
            assert beam.cum_logprob == completion.cumulative_logprob
            sums = [entry[token].logprob for entry, token in zip(beam.logprobs, beam.tokens[-4:])]
            assert sum(sums) == pytest.approx(beam.cum_logprob)
            decode = tiny.get_tokenizer().decode
            assert beam.text == decode(beam.tokens)
            assert beam.finish_reason == "length"
    assert found[0].sequences[0].text.startswith("ab")
    (single,) = tiny.beam_search("ab", BeamSearchParams(1, 4, ignore_eos=True))
    (greedy,) = tiny.generate("ab", GREEDY, use_tqdm=False)
    assert [one.tokens[2:] for one in single.sequences] == [greedy.outputs[0].token_ids[:4]]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (BeamSearchParams(0, 4), "beam_width"),
        (BeamSearchParams(2, 0), "max_tokens"),
        (BeamSearchParams(2, 4, temperature=0.7), "temperature"),
        (BeamSearchParams(2, 4, structured_outputs={}), "structured_outputs"),
        (GREEDY, "params"),
    ],
)
def test_wrong_beam_search_is_refused(tiny: LLM, params: Any, field: str) -> None:
    with pytest.raises(SamplingError, match=f"^{field}="):
        tiny.beam_search("a", params)


def test_what_vllms_llm_has_and_this_one_has_not(tiny: LLM) -> None:
    with pytest.raises(AttributeError, match="LLM.reward: a reward model is not available yet"):
        tiny.reward(["x"])
    with pytest.raises(AttributeError, match="LLM.generat: no such attribute"):
        tiny.generat("x")
    assert not hasattr(tiny, "wake_up")


@pytest.mark.parametrize("call", ["embed", "classify", "encode", "score"])
def test_a_model_that_generates_does_not_pool(tiny: LLM, call: str) -> None:
    texts = ["x", "y"] if call == "score" else ["x"]
    with pytest.raises(PoolingError) as caught:
        getattr(tiny, call)(*texts)
    assert str(caught.value) == (
        f"task={call!r}: this model generates text; load one that pools, or make it pool with "
        "LLM(..., runner='pooling')"
    )


def test_a_bar_of_the_users_own(tiny: LLM) -> None:
    class Bar(tqdm):
        made: ClassVar[list[Any]] = []

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, file=io.StringIO(), **kwargs)
            self.made.append(self)

    tiny.generate(["x", "y"], GREEDY, use_tqdm=Bar)
    assert [bar.n for bar in Bar.made] == [2]


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
        metrics = llm.metrics()
        objects = {
            (metric.name, metric.labels.get("phase")): metric for metric in llm.get_metrics()
        }
    assert metrics["prompt_tokens"] == 80
    assert metrics["generation_tokens"] == 32
    assert metrics["prefix_cache_queries"] == 80
    assert metrics["prefix_cache_hits"] == 32
    assert metrics["num_requests_finished"] == 4
    assert metrics["num_preemptions"] == metrics["num_requests_running"] == 0
    assert all(isinstance(value, (int, float)) for value in metrics.values())
    tokens = objects["vllm:generation_tokens", None]
    assert isinstance(tokens, Counter) and tokens.value == 32
    assert tokens.labels == {"model_name": str(tiny_folder), "engine": "0"}
    running = objects["vllm:num_requests_running", None]
    assert isinstance(running, Gauge) and running.value == 0
    drafts = objects["vllm:spec_decode_num_accepted_tokens_per_pos", None]
    assert isinstance(drafts, Vector) and drafts.values == []
    sizes = objects["vllm:iteration_tokens_total", None]
    assert isinstance(sizes, Histogram)
    assert (sizes.count, sizes.sum) == (metrics["num_steps"], 80 - 32 + 32)
    assert sizes.buckets["+Inf"] == sizes.count
    assert isinstance(objects["hetero_llm:step_seconds", "launch"], Histogram)


def test_how_to_pool_says_nothing_to_a_model_that_generates(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(tiny_folder), device="cpu", pooler_config={"pooling_type": "MEAN"}) as llm:
        assert llm.generate("ab", GREEDY, use_tqdm=False)
    assert "pooler_config has no effect on a model that generates text" in caplog.text


def test_few_batched_tokens_need_no_other_argument(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), None, device="cpu", max_num_batched_tokens=48) as llm:
        assert len(llm.generate(["x"] * 50, GREEDY, use_tqdm=False)) == 50
    with pytest.raises(ConfigError, match=r"^max_num_seqs=49: .*max_num_batched_tokens \(48\)"):
        LLM(str(tiny_folder), device="cpu", max_num_batched_tokens=48, max_num_seqs=49)


@pytest.mark.parametrize("where", ["flags", "mapping"])
def test_drafts_beyond_the_context_are_refused(tiny_folder: Path, where: str) -> None:
    draft: dict[str, Any] = {
        "speculative_model": str(tiny_folder), "num_speculative_tokens": 2,
        "speculative_max_model_len": 65,
    }  # fmt: skip
    if where == "mapping":
        values = {"model": str(tiny_folder), "num_speculative_tokens": 2, "max_model_len": 65}
        draft = {"speculative_config": values}
    with pytest.raises(ConfigError, match=r"^speculative_max_model_len=65: exceeds max_model_len"):
        LLM(str(tiny_folder), device="cpu", max_model_len=64, draft_optional=True, **draft)


@pytest.mark.usefixtures("interruptible")
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


def test_a_context_as_long_as_the_cache_holds(tiny_folder: Path) -> None:
    shared: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 8}
    own = load_model_config(tiny_folder).max_model_len
    for wanted, blocks, length in (("auto", 3, 24), (-1, 3, 24), ("auto", own, own)):
        with LLM(
            str(tiny_folder), max_model_len=wanted, num_gpu_blocks_override=blocks, **shared
        ) as llm:
            assert llm.model_config.max_model_len == length
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            (output,) = llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 20
    with pytest.raises(ConfigError, match="^gpu_memory_utilization=.*lower max_model_len"):
        LLM(str(tiny_folder), max_model_len="auto", gpu_memory_utilization=1e-9, **shared)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_long_blocks_change_no_token(backend: str) -> None:
    found = []
    for size in (16, 128):
        with LLM("demo", device="cpu", cpu_backend=backend, block_size=size) as llm:
            prompts = ["import numpy as np\n" * 30, "import numpy as np\n" * 30 + "x", "def f("]
            for _ in range(2):  # the second time from the prefix cache
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                found.append([one.outputs[0].token_ids for one in outputs])
            assert llm.metrics()["prefix_cache_hits"] > 0
    assert found[0] == found[1] == found[2] == found[3]
