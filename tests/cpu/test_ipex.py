"""`cpu_backend="ipex"` beside a matching IPEX. `make test-ipex` makes the environment for it; the
refusals of every other environment are tested in tests/scenarios/test_cpu_backend.py."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hetero_llm import LLM, RequestOutput, SamplingParams
from hetero_llm.cpu import ipex
from hetero_llm.cpu.ipex_version import installed_version, mismatch
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.models.layers import Linear
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.model_runner import TorchModelRunner
from tests.models.tiny import make_tiny_checkpoint

_VERSION = installed_version()
pytestmark = pytest.mark.skipif(
    _VERSION is None or mismatch(_VERSION, torch.__version__) is not None,
    reason="no IPEX for this torch here: make test-ipex",
)

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
# Products that are not IPEX's, as the profiler names them.
FOREIGN = {
    "aten::linear",
    "aten::addmm",
    "aten::mm",
    "mkldnn::_linear_pointwise",
    "aten::mkldnn_linear",
}
OURS = ("torch_ipex::tpp_linear", "torch_ipex::tpp_linear_bias", "torch_ipex::ipex_linear")


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


def start(model: str, backend: str, **engine_args: Any) -> LLM:
    settings = {"device": "cpu", "dtype": "bfloat16", "max_num_seqs": 8, **engine_args}
    return LLM(model, cpu_backend=backend, disable_log_stats=True, **settings)


def demo_prompts(count: int) -> list[list[int]]:
    """Held-out prompts of 8 tokens, 21, 34 ..."""
    return [heldout_prompts().prompts[i, : 8 + 13 * i].tolist() for i in range(count)]


def generate(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(c.token_ids) for c in o.outputs] for o in outputs]


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with start("demo", "ipex") as llm:
        yield llm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(128, 192), (96, 64), (48, 128), (40, 64), (64, 52), (4096, 320)]
)
def test_products_equal_torchs(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    ipex.require_ipex(dtype)
    torch.manual_seed(0)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for bias in (False, True):
        linear = Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
        for parameter in linear.parameters():
            parameter.normal_()
        x = torch.randn(300, 2 * inputs).to(dtype)[:, :inputs]  # rows are not contiguous
        want = x.double() @ linear.weight.double().t()
        want += 0 if linear.bias is None else linear.bias.double()
        linear.product = ipex.packed_product(linear)
        linear.weight.data = linear.weight.data.new_empty(0)
        for rows in (1, 2, 3, 7, 16, 33, 64, 65, 300):
            got = linear(x[:rows])
            assert got.dtype == dtype and got.is_contiguous()
            error = (got.double() - want[:rows]).abs().max() / want.abs().max()
            assert float(error) < tolerance, (rows, bias)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_are_the_torch_backends_up_to_near_ties(dtype: str) -> None:
    """Every token is torch's most probable next one, or within rounding of it."""
    prompts = demo_prompts(8)
    with start("demo", "ipex", dtype=dtype) as llm:
        assert llm.backend == "ipex"
        ours = tokens_of(generate(llm, prompts))
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    with start("demo", "torch", dtype=dtype) as llm:
        assert llm.backend == "torch"
        theirs = tokens_of(generate(llm, prompts))
        whole = [p + tokens for p, (tokens,) in zip(prompts, ours)]
        scored = generate(llm, whole, score)
    # Of bfloat16 logits, here 16 to 32: two units in the last place.
    slack = 1e-3 if dtype == "float32" else 0.25
    for prompt, output in zip(prompts, scored):
        logprobs = output.prompt_logprobs
        assert logprobs is not None
        for token, entry in list(zip(output.prompt_token_ids, logprobs))[len(prompt) :]:
            best = max(candidate.logprob for candidate in entry.values())
            assert entry[token].logprob >= best - slack
    same = sum(a == b for a, b in zip(ours, theirs))
    assert same >= (len(prompts) if dtype == "float32" else len(prompts) // 2)


def products(llm: LLM, prompts: list[list[int]], new_tokens: int) -> tuple[Counter[str], int]:
    """How often each operator ran, and the number of steps."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    before = llm.metrics()["num_steps"]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        generate(llm, prompts, params)
    counts = Counter(event.name for event in seen.events())
    return counts, int(llm.metrics()["num_steps"] - before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_product_of_a_step_is_an_ipex_operator(dtype: str) -> None:
    with start("demo", "ipex", dtype=dtype) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, TorchModelRunner)
        linears = [m for m in runner.model.modules() if isinstance(m, Linear)]
        counts, steps = products(llm, demo_prompts(3), 6)
    assert steps == 6 and len(linears) > 4
    assert counts["torch_ipex::tpp_linear"] == steps * len(linears)
    assert not FOREIGN & set(counts)
    with start("demo", "torch", dtype=dtype) as llm:
        assert FOREIGN & set(products(llm, demo_prompts(3), 2)[0])


@pytest.mark.parametrize(
    ("family", "variant"),
    [("llama", "biases"), ("qwen2", "full"), ("opt", "pre_norm"), ("gpt2", "tied")],
)
def test_other_families_and_sizes_that_make_no_blocks(
    family: str, variant: str, tmp_path: Path
) -> None:
    folder = str(make_tiny_checkpoint(tmp_path / "model", family, variant))
    arguments = {"skip_tokenizer_init": True, "dtype": "float32", "num_gpu_blocks_override": 32}
    prompts = [[5, 6, 7], [9] * 20]
    with start(folder, "ipex", **arguments) as llm:
        ours = tokens_of(generate(llm, prompts))
        counts, steps = products(llm, prompts, 4)
        runner: Any = llm.engine.runner
        linears = [m for m in runner.model.modules() if isinstance(m, Linear)]
    assert sum(counts[name] for name in OURS) == steps * len(linears)
    assert not FOREIGN & set(counts)
    with start(folder, "torch", **arguments) as llm:
        assert tokens_of(generate(llm, prompts)) == ours


def test_weights_are_dropped_after_packing_unless_tied(tmp_path: Path) -> None:
    for family, variant in (("llama", "gqa"), ("llama", "tied")):
        folder = make_tiny_checkpoint(tmp_path / variant, family, variant)
        tied = load_model_config(folder).tie_word_embeddings
        with start(str(folder), "ipex", skip_tokenizer_init=True) as llm:
            runner: Any = llm.engine.runner
            linears = [m for m in runner.model.modules() if isinstance(m, Linear)]
            kept = [m for m in linears if m.weight.numel()]
            assert len(kept) == tied


def test_prefixes_are_cached(demo: LLM) -> None:
    prompt = heldout_prompts().prompts[40, :100].tolist()
    first, again = generate(demo, [prompt]), generate(demo, [prompt])
    assert first[0].num_cached_tokens == 0 and again[0].num_cached_tokens == 96
    assert len(again[0].outputs[0].token_ids) == GREEDY.max_tokens


def test_a_batch_of_mixed_sampling_draws_what_torch_draws() -> None:
    """In float32, where the logits differ by some last bits only."""
    common = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, seed=1, **common),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=2, **common),
        SamplingParams(temperature=1.0, min_p=0.05, seed=3, n=3, **common),
        SamplingParams(temperature=0.5, repetition_penalty=1.3, seed=4, logprobs=2, **common),
    ]
    drawn = {}
    for backend in ("ipex", "torch"):
        with start("demo", backend, dtype="float32") as llm:
            outputs = generate(llm, demo_prompts(len(params)), params)
            assert outputs[4].outputs[0].logprobs is not None
            drawn[backend] = tokens_of(outputs)
    assert [len(samples) for samples in drawn["ipex"]] == [1, 1, 1, 3, 1]
    assert drawn["ipex"] == drawn["torch"]


def test_preempted_sequences_write_the_same_tokens() -> None:
    prompts = [p[:16] for p in demo_prompts(8) if len(p) >= 16]
    written = []
    for blocks in (16 * len(prompts), 8):
        with start("demo", "ipex", dtype="float32", max_model_len=128,
                   num_gpu_blocks_override=blocks) as llm:  # fmt: skip
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
            written.append(tokens_of(generate(llm, prompts, params)))
            assert (llm.metrics()["num_preemptions"] > 0) == (blocks == 8)
    assert written[0] == written[1]


def test_the_log_says_once_who_serves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hetero_llm.cpu.backend")
    with start("demo", "ipex", cpu_threads=1):
        assert torch.get_num_threads() == 1
    lines = [r.message for r in caplog.records if r.name == "hetero_llm.cpu.backend"]
    assert lines == [f"ipex serves: IPEX {_VERSION}, 1 threads"]
