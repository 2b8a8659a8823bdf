"""Quantized weights through the executor against the torch path on the dequantized model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetero_llm import LLM, RequestOutput, SamplingParams
from hetero_llm.cpu import backend, native
from hetero_llm.cpu.model_runner import NativeModelRunner
from hetero_llm.models import loader
from hetero_llm.models.layers import Linear
from hetero_llm.quantization.matrix import QuantizedMatrix, QuantizedWeight, dequantize
from hetero_llm.utils import topology
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint
from tests.quantization.matrices import random_matrix

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled library")

PARAMS = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprobs=3
)
# Of log-probabilities, with inputs of products in 8 bits: the mean and the largest error.
MEAN_ERROR, MOST_ERROR = 0.02, 0.12
ALL = "int4 and int8, a head of each kind"
FORMS: dict[str, Callable[[int, int, int], QuantizedMatrix]] = {
    "int4-32": lambda n, k, seed: _matrix("int4", n, k, seed, group=32),
    "int4-64-zeros": lambda n, k, seed: _matrix(
        "int4", n, k, seed, group=64, zeros="zero", scale_dtype=torch.float16
    ),
    "int4-128-offsets": lambda n, k, seed: _matrix("int4", n, k, seed, group=128, zeros="offset"),
    "int8-rows": lambda n, k, seed: _matrix("int8", n, k, seed),
    "int8-32": lambda n, k, seed: _matrix("int8", n, k, seed, group=32, row_scale=True),
}


def _matrix(kind: Any, height: int, width: int, seed: int, **other: Any) -> QuantizedMatrix:
    """Random, of the size of a tiny model's weights; zero points in the middle of the range."""
    matrix = random_matrix(kind, height, width, seed=seed, **other)
    small = {"scale": matrix.scale * 0.12}
    if matrix.zero is not None:
        small["zero"] = matrix.zero // 4 + 6
    if matrix.offset is not None:
        small["offset"] = (-8 + matrix.offset / 4) * small["scale"]
    return dataclasses.replace(matrix, **small)


def start(folder: Path, backend: str = "native", **engine_args: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32", "block_size": 8, "max_num_seqs": 8, "num_gpu_blocks_override": 64,
        "disable_log_stats": True, "skip_tokenizer_init": True, "cpu_backend": backend,
        "cpu_threads": 1,
    }  # fmt: skip
    return LLM(str(folder), device="cpu", **{**defaults, **engine_args})


def generate(llm: LLM) -> list[RequestOutput]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in (20, 1, 9, 33)]
    return llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama")


class Loaded:
    """Replaces the weights that `load_model` loads.

    Args:
        change: (index of the Linear, the Linear, whether it is the head) -> its new weight or None.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        change: Callable[[int, Linear, bool], nn.Module | nn.Parameter | None],
    ) -> None:
        load_model = loader.load_model
        self.models: list[Any] = []

        def load(*args: Any, **kwargs: Any) -> Any:
            model = load_model(*args, **kwargs)
            linears = [each for each in model.modules() if isinstance(each, Linear)]
            for index, linear in enumerate(linears):
                weight = change(index, linear, linear is model.lm_head)
                if weight is not None:
                    del linear.weight
                    linear.weight = weight
            self.models.append(model)
            return model

        monkeypatch.setattr(loader, "load_model", load)


def compare(ours: list[RequestOutput], others: list[RequestOutput]) -> list[float]:
    """Errors of log-probabilities up to where tokens differ, which they do in near-ties alone."""
    errors: list[float] = []
    for mine, other in zip(ours, others, strict=True):
        pairs = list(zip(mine.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True))
        (a,), (b,) = mine.outputs, other.outputs
        for token, its, row, its_row in zip(
            a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=True
        ):
            pairs.append((row, its_row))
            if token != its:
                assert token in its_row, "not among the likeliest"
                assert its_row[its].logprob - its_row[token].logprob < 2 * MOST_ERROR
                break
        for row, its_row in pairs:
            errors += [row[t].logprob - its_row[t].logprob for t in row.keys() & its_row.keys()]
    return errors


@pytest.mark.parametrize("form", [*FORMS, ALL])
def test_tokens_are_those_of_the_dequantized_model(
    folder: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = list(FORMS.values())

    def matrix_of(index: int, linear: Linear, head: bool) -> QuantizedMatrix | None:
        if head and form != ALL:
            return None
        make = kinds[index % len(kinds)] if form == ALL else FORMS[form]
        return make(*linear.weight.shape, index)

    def quantized(index: int, linear: Linear, head: bool) -> nn.Module | None:
        matrix = matrix_of(index, linear, head)
        return None if matrix is None else QuantizedWeight(matrix)

    def dequantized(index: int, linear: Linear, head: bool) -> nn.Parameter | None:
        matrix = matrix_of(index, linear, head)
        return None if matrix is None else nn.Parameter(dequantize(matrix, torch.float32))

    with monkeypatch.context() as patch:
        Loaded(patch, quantized)
        with start(folder) as llm:
            assert isinstance(llm.engine.runner, NativeModelRunner)
            ours = generate(llm)
    with monkeypatch.context() as patch:
        Loaded(patch, dequantized)
        with start(folder, "torch") as llm:
            others = generate(llm)
    errors = np.abs(compare(ours, others))
    assert len(errors) > 200
    assert errors.mean() < MEAN_ERROR and errors.max() < MOST_ERROR, (errors.mean(), errors.max())


def test_other_kinds_become_the_models_type_and_the_log_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without rounding of inputs: float weights are exact."""

    def matrix_of(index: int, linear: Linear) -> QuantizedMatrix:
        kind = ("fp8", "nf4", "int4")[index % 3]
        order = kind == "int4"
        return random_matrix(kind, *linear.weight.shape, group=64, order=order, seed=index)

    with monkeypatch.context() as patch:
        Loaded(
            patch, lambda i, linear, head: None if head else QuantizedWeight(matrix_of(i, linear))
        )
        with start(folder) as llm:
            ours = generate(llm)
    with monkeypatch.context() as patch:
        Loaded(
            patch,
            lambda i, linear, head: (
                None if head else nn.Parameter(dequantize(matrix_of(i, linear), torch.float32))
            ),
        )
        with start(folder, "torch") as llm:
            others = generate(llm)
    assert np.abs(compare(ours, others)).max() < 1e-3
    lines = [r.message for r in caplog.records if r.name == "hetero_llm.cpu.executor"]
    assert len(lines) == 1 and "fp8" in lines[0] and "int4 with reordered columns" in lines[0]
    assert lines[0].endswith("it holds these matrices as float")


def test_the_executor_frees_what_it_has_packed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quantized(index: int, linear: Linear, head: bool) -> nn.Module | None:
        return None if head else QuantizedWeight(FORMS["int4-32"](*linear.weight.shape, index))

    with monkeypatch.context() as patch:
        loaded = Loaded(patch, quantized)
        with start(folder):
            (model,) = loaded.models
            weights = [each for each in model.modules() if isinstance(each, QuantizedWeight)]
            assert weights and all(b.is_meta for each in weights for b in each.buffers())
            assert all(each.matrix.device.type == "meta" for each in weights)


# -- several NUMA nodes -----------------------------------------------------------------------


POOLS = [(0, 0, 0, 1, 1), (0, 1, 1, 1, 1), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("family", "weights"),
    [("llama", "auto"), ("llama", "int8"), ("llama", "int4"), ("mixtral", "auto")],
)
def test_pools_of_threads_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, weights: str
) -> None:
    """Five threads on this machine's cores, as if these were on several nodes. Prompts are taken in
    steps of few and of many tokens."""
    cpus = sorted(os.sched_getaffinity(0))
    chosen = tuple(cpus[i % len(cpus)] for i in range(5))
    folder = make_tiny_checkpoint(tmp_path / family, family)
    monkeypatch.setattr(backend, "compute_cpus", lambda reserve: chosen)
    found = []
    for pools in (None, *POOLS):
        monkeypatch.setattr(topology, "numa_pools", lambda cpus, pools=pools: pools)
        with start(
            folder, cpu_threads=5, cpu_weight_dtype=weights, max_num_batched_tokens=40
        ) as llm:
            outputs = generate(llm) + generate(llm)
        found.append(
            [
                (one.token_ids, one.logprobs, output.prompt_logprobs)
                for output in outputs
                for one in output.outputs
            ]
        )
    assert all(other == found[0] for other in found[1:])
