"""Scripts for vLLM run after search-and-replace of its name."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from hetero_llm import ConfigError, PoolingError

IMPORTS = """
from vllm import LLM, AsyncEngineArgs, AsyncLLMEngine, CompletionOutput, EngineArgs, LLMEngine
from vllm import PoolingParams, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from vllm.beam_search import BeamSearchOutput
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.engine.llm_engine import LLMEngine
from vllm.entrypoints.llm import LLM
from vllm.inputs import PromptType, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.prompt_adapter.request import PromptAdapterRequest
from vllm.outputs import ClassificationRequestOutput, EmbeddingOutput, EmbeddingRequestOutput
from vllm.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput, ScoringRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams, RequestOutputKind
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm import __version__, __version_tuple__
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.async_llm_engine import AsyncEngineDeadError
from vllm.entrypoints.cli.main import main
from vllm.inputs.data import TextPrompt, TokensPrompt
from vllm.logger import init_logger
from vllm.logprobs import Logprob
from vllm.sequence import Logprob, RequestMetrics
from vllm.tokenizers import get_tokenizer
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.usage.usage_lib import UsageContext
from vllm.utils import FlexibleArgumentParser, random_uuid
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.version import __version__
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector
"""

OFFLINE = """
from dataclasses import asdict

from vllm import LLM, EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import BeamSearchParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

args = EngineArgs(model=MODEL, dtype="float32", device="cpu", enforce_eager=True, max_num_seqs=8)
llm = LLM(**asdict(args))
params = SamplingParams(temperature=0.8, top_p=0.95, logprobs=True, seed=-1)
params.max_tokens = 6
params.stop = ["###"]
for output in llm.generate(["Hello", "The future"], params):
    assert output.prompt in ("Hello", "The future")
    assert len(output.outputs[0].token_ids) == len(output.outputs[0].logprobs)
params = params.clone()
params.temperature = 0.0
ids = llm.get_tokenizer().encode("Hello")
texts = [
    llm.generate(prompts, sampling_params=params, use_tqdm=False)[0].outputs[0].text
    for prompts in ("Hello", ids, [ids], TokensPrompt(prompt_token_ids=ids), {"prompt": "Hello"})
]
assert len(set(texts)) == 1
chat = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
(answer,) = llm.chat(chat, params, chat_template="{{ messages[0].content }}")
assert answer.outputs[0].text == texts[0]
(beams,) = llm.beam_search([{"prompt": "Hello"}], BeamSearchParams(beam_width=2, max_tokens=4))
assert [len(beam.tokens) for beam in beams.sequences] == [len(ids) + 4] * 2
seen = set()
for metric in llm.get_metrics():
    seen.add(type(metric))
    if isinstance(metric, (Counter, Gauge)):
        assert metric.value >= 0
    elif isinstance(metric, Vector):
        assert metric.values == []
    elif isinstance(metric, Histogram):
        assert metric.buckets["+Inf"] == metric.count
assert seen == {Counter, Gauge, Vector, Histogram}
"""

STEPS = """
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.utils import FlexibleArgumentParser, random_uuid


def main(args):
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    prompts = [
        ("A robot", SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)),
        ("To be", SamplingParams(n=2, max_tokens=5)),
    ]
    finished = {}
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, params = prompts.pop(0)
            engine.add_request(random_uuid(), prompt, params)
        for output in engine.step():
            if output.finished:
                finished[output.prompt] = [len(one.token_ids) for one in output.outputs]
    assert finished["A robot"] == [3] and len(finished["To be"]) == 2
    assert engine.get_model_config().max_model_len == 64


parser = FlexibleArgumentParser(description="steps")
parser = EngineArgs.add_cli_args(parser)
main(parser.parse_args())
"""


MODULES = {
    "entrypoints.openai.api_server": "serve",
    "entrypoints.api_server": "serve",
    "entrypoints.openai.run_batch": "run-batch",
}


def run(script: str, model: Path, folder: Path) -> None:
    path = folder / "script.py"
    path.write_text(re.sub(r"\bvllm\b", "hetero_llm", script).replace("MODEL", repr(str(model))))
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("script", [IMPORTS, OFFLINE], ids=["imports", "offline"])
def test_a_script(script: str, tiny_folder: Path, tmp_path: Path) -> None:
    run(script, tiny_folder, tmp_path)


def test_a_script_with_flags(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"--model {tiny_folder} --dtype float32 --device cpu --max_model_len 64"
    monkeypatch.setattr(sys, "argv", ["script.py", *flags.split()])
    run(STEPS, tiny_folder, tmp_path)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("from vllm import LLM\nLLM('m', qlora_adapter_name_or_path='/a')", "QLoRA is"),
        ("from vllm import PoolingParams\nPoolingParams(step_tag_id=1)", "a reward model is"),
    ],
)
def test_what_is_not_there_yet_says_so(script: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, PoolingError), match=f"{reason} not available yet"):
        run(script, tmp_path, tmp_path)


@pytest.mark.parametrize("module", MODULES)
def test_modules_that_are_commands(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["python", "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module(f"hetero_llm.{module}", run_name="__main__")
    assert caught.value.code == 0
    assert f"hetero-llm {MODULES[module]} " in capsys.readouterr().out
