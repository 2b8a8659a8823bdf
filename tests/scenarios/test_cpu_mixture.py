"""Mixtures of experts on the native executor, through `LLM`: tokens and log-probabilities are those
of the torch path, whatever the weights' form and whatever a drafter or the scheduler does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.cpu import native
from hetero_llm.engine import factory
from hetero_llm.models import loader
from hetero_llm.models.experts import Experts
from hetero_llm.quantization.matrix import QuantizedStack
from tests.cpu.test_model_runner import (
    GREEDY,
    SAMPLED,
    WITH_LOGPROBS,
    TreeDrafter,
    check_logprobs,
    generate,
    serve,
    start,
    tokens_of,
)
from tests.models.test_quantized_weights import FORMATS, INT4_GROUPS, tensors_of
from tests.models.test_quantized_weights import both as quantized_and_plain
from tests.models.tiny import make_tiny_checkpoint
from tests.scenarios.test_lora import Base, make_base, prompts_of, run

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled library")

FAMILIES = {"mixtral": "three_of_seven", "qwen2_moe": "every_second"}
EXACT = ("fp8", "gptq ordered", "nvfp4")
"""Formats that the executor dequantizes: their products take float inputs."""
KEPT = {
    **{name: FORMATS[name] for name in ("awq", "pack-quantized", "int-quantized")},
    "int8 groups": tensors_of("pack-quantized", {**INT4_GROUPS, "num_bits": 8}),
}
"""Formats whose integers it keeps: its products take inputs in 8 bits."""
# Of log-probabilities: the median error, and that of 90%; inputs in 8 bits let a few tokens choose
# another expert.
MEDIAN_ERROR, MOST_ERROR = 0.08, 0.5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch, whose own would get in the executor's way on a small machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("mixture")
    return make_tiny_checkpoint(parent / "model", request.param, FAMILIES[request.param])


def logprob_errors(ours: list[Any], others: list[Any]) -> np.ndarray:
    """Of the prompts' tokens."""
    errors: list[float] = []
    for mine, other in zip(ours, others, strict=True):
        for row, its in zip(mine.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            errors += [row[t].logprob - its[t].logprob for t in row.keys() & its.keys()]
    assert len(errors) > 100
    return np.abs(errors)


def two_backends(folder: Path, params: Any = WITH_LOGPROBS, **engine_args: Any) -> list[Any]:
    found = []
    for backend in ("native", "torch"):
        with start(folder, backend, cpu_threads=1, **engine_args) as llm:
            assert llm.backend == backend
            found.append(generate(llm, params))
    return found


@pytest.mark.parametrize("form", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
def test_formats_that_are_dequantized(
    tmp_path: Path, family: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = quantized_and_plain(tmp_path, FORMATS[form], family)
    ours, others = two_backends(quantized)
    assert tokens_of(ours) == tokens_of(others)
    for mine, other in zip(ours, others, strict=True):
        check_logprobs(mine.prompt_logprobs, other.prompt_logprobs, 1e-3)
    assert any("it holds these matrices as float" in r.message for r in caplog.records)


@pytest.mark.parametrize("form", KEPT)
@pytest.mark.parametrize("family", FAMILIES)
def test_formats_whose_integers_are_kept(
    tmp_path: Path, family: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = quantized_and_plain(tmp_path, KEPT[form], family)
    errors = logprob_errors(*two_backends(quantized))
    assert np.median(errors) < MEDIAN_ERROR and np.quantile(errors, 0.9) < MOST_ERROR
    assert not any("it holds these matrices as" in r.message for r in caplog.records)


@pytest.mark.parametrize(("weights", "most"), [("int8", 0.1), ("int4", 0.6)])
def test_rounded_weights(folder: Path, weights: str, most: float) -> None:
    """Close to the float weights, and not the same."""
    with start(folder, cpu_weight_dtype=weights, cpu_threads=1) as llm:
        ours = generate(llm, WITH_LOGPROBS)
    with start(folder) as llm:
        errors = logprob_errors(ours, generate(llm, WITH_LOGPROBS))
    assert 1e-3 < np.median(errors) < most


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_drafts_change_no_token(folder: Path, params: Any) -> None:
    given = {
        "model": str(folder), "device": "cpu", "dtype": "float32", "block_size": 8,
        "skip_tokenizer_init": True, "num_gpu_blocks_override": 96, "disable_log_stats": True,
        "max_num_batched_tokens": 24,
    }  # fmt: skip
    params = dataclasses.replace(params, max_tokens=24)
    config = EngineConfig.from_args(resolve_engine_args(given))
    build = partial(factory.build_engine, config, show_progress=False)
    built = build()
    assert built.backend == "native"
    plain = serve(built.engine, params)
    drafter = TreeDrafter(plain, right=0.7)
    engine = build(drafter=drafter).engine
    assert serve(engine, params) == plain
    assert 0 < engine.metrics()["spec_decode_num_accepted_tokens"] < drafter.num_nodes


def test_chunks_prefix_hits_and_preemptions_change_no_token(folder: Path) -> None:
    lengths = (40, 33, 21, 9)
    with start(folder) as llm:
        plain = tokens_of(generate(llm, SAMPLED, *lengths))
        assert tokens_of(generate(llm, SAMPLED, *lengths)) == plain
        assert llm.engine.metrics()["prefix_cache_hits"] > 0
    small = {
        "num_gpu_blocks_override": 12,
        "max_model_len": 64,
        "enable_prefix_caching": False,
    }
    with start(folder, max_num_batched_tokens=11, **small) as llm:
        assert tokens_of(generate(llm, SAMPLED, *lengths)) == plain
        assert llm.engine.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("form", ["", "awq"])
def test_the_models_own_tensors_are_given_up(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that memory does not double, and nothing runs through torch unnoticed."""
    folder = tmp_path / "plain"
    if form:
        folder, _ = quantized_and_plain(tmp_path, FORMATS[form], "qwen2_moe")
    else:
        make_tiny_checkpoint(folder, "qwen2_moe")
    models: list[Any] = []
    load_model = loader.load_model

    def load(*args: Any, **kwargs: Any) -> Any:
        models.append(load_model(*args, **kwargs))
        return models[-1]

    monkeypatch.setattr(loader, "load_model", load)
    start(folder).close()
    experts = [module for module in models[0].modules() if isinstance(module, Experts)]
    assert experts
    assert all(parameter.numel() == 0 for parameter in models[0].parameters())
    for module in experts:
        for stack in module.quantized.values():
            assert isinstance(stack, QuantizedStack) and stack.device.type == "meta"
        assert bool(module.quantized) == bool(form)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Adapters of the routers and the shared experts' gates, too."""
    base = make_base(tmp_path_factory.mktemp("adapted"), "qwen2_moe", 2, ".*(attn|shared_).*")
    generator = torch.Generator().manual_seed(5)
    for adapter in base.adapters:
        tensors = dict(adapter.tensors)
        shapes = {"gate": 6, "shared_expert_gate": 1}
        down = next(t for name, t in tensors.items() if "q_proj.lora_A" in name)
        for layer in (0, 1, 2):
            for name, rows in shapes.items():
                module = f"base_model.model.model.layers.{layer}.mlp.{name}"
                rank = len(down)
                tensors[f"{module}.lora_A.weight"] = torch.randn(down.shape, generator=generator)
                tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(
                    rows, rank, generator=generator
                )
        save_file(tensors, adapter.folder / "adapter_model.safetensors")
        config = (adapter.folder / "adapter_config.json").read_text()
        config = config.replace('".*(attn|shared_).*"', '".*(attn|shared_|mlp.gate).*"')
        (adapter.folder / "adapter_config.json").write_text(config)
    return base


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_adapters_of_routers_and_shared_experts(adapted: Base, weights: str) -> None:
    """In one batch with the base; int8: the adapters' inputs are not those of the products."""
    which = [1, 0, 2, 1, 2, 0]
    requests = [adapted.requests[w] for w in which]
    found = []
    for backend in ("native", "torch"):
        rounded = {"cpu_weight_dtype": weights} if backend == "native" else {}
        with adapted.start(
            cpu_backend=backend, max_num_batched_tokens=13, cpu_threads=1, **rounded
        ) as llm:
            assert llm.backend == backend
            found.append(run(llm, prompts_of(6), WITH_LOGPROBS, requests))
    ours, others = found
    if weights == "int8":
        errors = []
        for mine, other in zip(ours, others, strict=True):
            for row, its in zip(
                (mine.prompt_logprobs or [])[1:], (other.prompt_logprobs or [])[1:], strict=True
            ):
                errors += [row[t].logprob - its[t].logprob for t in row.keys() & its.keys()]
        assert 1e-3 < np.median(np.abs(errors)) < 0.2
        return
    assert tokens_of(ours) == tokens_of(others)
    assert tokens_of(ours)[0] != tokens_of(ours)[1] or tokens_of(ours)[3] != tokens_of(ours)[4]
    for mine, other in zip(ours, others, strict=True):
        check_logprobs(mine.prompt_logprobs or [], other.prompt_logprobs or [], 1e-3)
