"""Which variants of kernels the requests of an engine need: its start has compiled them all.

Nothing runs on a GPU: see `tests.helpers.kernel_variants`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm import SamplingParams
from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.drafter import Drafter
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.input_processor import InputProcessor, Prompt
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.gpu import graph_set, model_runner
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.kernels.exchange import apply_step_inputs, fetch_pinned
from hetero_llm.gpu.kernels.launch import INTERPRETED
from hetero_llm.gpu.kernels.lora_product import group_rows
from hetero_llm.gpu.kernels.norm import quantized_rms_norm
from hetero_llm.gpu.kernels.quantize_rows import quantize_rows
from hetero_llm.gpu.kernels.quantized_gemm import prepare
from hetero_llm.gpu.kernels.sample import (
    ROW_FIELDS,
    SampleRows,
    make_sample_workspace,
    sample_tokens,
)
from hetero_llm.gpu.kernels.skinny_gemm import choose, linear, serves
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.prefix_cache import PrefixCache
from hetero_llm.models.layers import Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.quantization.matrix import BLOCK_ROWS
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.scheduler.scheduler import Scheduler
from tests.helpers.drafters import Garbage
from tests.helpers.kernel_variants import (
    BodiesAgain,
    only_recorded,
    use_references_for_step_inputs,
)
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint
from tests.quantization.matrices import random_matrix

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="records launches of the interpreter")

SEQS, BUDGET, MAX_LEN, BLOCKS = 20, 1600, 1640, 400
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 7, "min_p": 0.01, "seed": 1, "n": 2},
    {"temperature": 0.0, "logprobs": 3, "presence_penalty": 0.4},
    {"temperature": 0.5, "repetition_penalty": 1.1, "logit_bias": {5: 2.0}, "top_p": 0.9},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.0, "use_beam_search": True, "best_of": 3, "n": 3},
]


@pytest.fixture
def bodies_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs without a GPU."""
    monkeypatch.setattr(model_runner, "GraphSet", BodiesAgain)
    monkeypatch.setattr(graph_set, "replay_seconds", lambda _, keys: [1e-3] * len(keys))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    use_references_for_step_inputs(monkeypatch)


@pytest.mark.usefixtures("bodies_again")
@pytest.mark.parametrize(
    ("family", "variant", "changes"),
    [
        ("llama", "heads_of_16", {"hidden_size": 256, "intermediate_size": 256}),
        ("gpt_oss", "heads_of_16", {"num_local_experts": 100}),
    ],
    ids=["dense", "mixture"],
)
def test_requests_need_no_kernel_that_the_start_lacks(
    tmp_path: Path, family: str, variant: str, changes: dict[str, Any]
) -> None:
    """The number of KV blocks is given, so that no step is run to measure memory. Prompts of many
    lengths, alone and together, some with a known beginning; without drafts and with them."""
    folder = make_tiny_checkpoint(tmp_path, family, variant, layers=2, changes=changes)
    config, cpu, dtype = load_model_config(folder), torch.device("cpu"), torch.bfloat16
    model = load_model(folder, config, dtype=dtype, device=cpu, show_progress=False)
    speed_up(model)
    for module in model.modules():
        if isinstance(module, Linear):
            module.product = product
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, dtype)
    with only_recorded() as compiled:
        runner = GpuModelRunner(
            model,
            config,
            PagedKVCache(shape, BLOCKS, cpu),
            max_num_seqs=SEQS,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=BUDGET,
            graphs=True,
            most_drafted_tokens=BUDGET,
        )
    rng = np.random.default_rng(4)
    batches = [[1], [37], [515], [600], [700, 3], [1031], [1600]]
    batches += [rng.integers(1, 400, size).tolist() for size in (3, 8)]
    with only_recorded() as needed:
        for drafter in (None, Garbage({}, VOCAB_SIZE)):
            serve(runner, batches, rng, drafter)
    assert len(compiled) > 20 and len(needed) > 15
    assert needed - compiled == set()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As on a GPU, but zeros where the library multiplies, which would take most of the time."""
    if serves(x, weight, bias) and choose(x.shape[0], *weight.shape) is not None:
        return linear(x, weight, bias)
    return x.new_zeros(*x.shape[:-1], len(weight))


def serve(
    runner: GpuModelRunner, batches: list[list[int]], rng: np.random.Generator,
    drafter: Drafter | None,
) -> None:  # fmt: skip
    """Requests with prompts of these lengths, batch by batch."""
    inputs = InputProcessor(
        None, vocab_size=VOCAB_SIZE, max_model_len=MAX_LEN, eos_ids=(2,), max_logprobs=5, seed=0
    )
    scheduler = Scheduler(
        SchedulerConfig(SEQS, BUDGET, MAX_LEN, True, 16),
        BlockManager(BLOCKS, 16, PrefixCache()),
        drafter=drafter,
    )
    outputs = OutputProcessor(None, scheduler.stop_sequence)
    engine = Engine(inputs, scheduler, runner, outputs, asynchronous=True)
    known = rng.integers(3, VOCAB_SIZE, MAX_LEN).tolist()
    for index, batch in enumerate(batches):
        for i, length in enumerate(batch):
            ids = rng.integers(3, VOCAB_SIZE, length).tolist()
            ids[: length // 2 * ((index + i) % 2)] = known[: length // 2 * ((index + i) % 2)]
            params = SamplingParams(
                max_tokens=4, detokenize=False, ignore_eos=True, **KINDS[(index + i) % len(KINDS)]
            )
            engine.add_request(engine.make_request(f"{index} {i}", Prompt(token_ids=ids), params))
        while engine.has_unfinished:
            engine.step()


def test_one_kernel_takes_step_inputs_of_any_size_from_any_place() -> None:
    ring, words = torch.zeros(2, 400, dtype=torch.int32), torch.zeros(400, dtype=torch.int32)
    last, tables, turns = torch.zeros(4).long(), torch.zeros(4, 9).int(), torch.zeros(2).int()
    with only_recorded() as needed:
        for size, begin in ((1, 0), (16, 1), (17, 2)):
            turn, tokens = turns[begin % 2 :][:1], words[begin : begin + size]
            fetch_pinned(ring, turn, out=words[: 4 * size])
            apply_step_inputs(
                tokens,
                tokens,
                last,
                tables,
                words[begin : begin + 3 * size].view(3, size),
                words[begin : begin + 1],
                turn=turn,
                ring_size=2,
                out=tokens,
            )
    assert len(needed) == 2


def test_one_kernel_samples_from_any_place_in_a_buffer() -> None:
    workspace = make_sample_workspace(4, VOCAB_SIZE, torch.device("cpu"))
    words, last = torch.zeros(4 * ROW_FIELDS + 4, dtype=torch.int32), torch.zeros(5).long()
    with only_recorded() as needed:
        for begin in (0, 1):
            rows = words[begin : begin + 4 * ROW_FIELDS].view(ROW_FIELDS, 4)
            sample_tokens(
                torch.zeros(4, VOCAB_SIZE),
                SampleRows(rows),
                workspace,
                slots=words[begin : begin + 4],
                last_tokens=last[begin : begin + 4],
                out=last[begin : begin + 4],
            )
    assert len(needed) == 2


def test_one_kernel_groups_the_rows_of_adapters_in_all_large_steps() -> None:
    with only_recorded() as needed:
        for rows in (graph_set.MAX_GRAPH_TOKENS, 700, 1025, 8192):
            group_rows(torch.zeros(rows, dtype=torch.int32), num_slots=4, block=16)
    assert len(needed) == 1


def test_one_kernel_quantizes_any_number_of_rows() -> None:
    """With scales of groups their stride is that number, rounded up."""
    matrix = prepare(random_matrix("fp8", 144, 256, group=128, rows=BLOCK_ROWS))
    weight = torch.ones(256, dtype=torch.bfloat16)
    with only_recorded() as needed:
        for rows in range(1, 20):
            x = torch.ones(rows, 256, dtype=torch.bfloat16)
            quantize_rows(x, matrix)
            quantized_rms_norm(x, None, weight, 1e-6, matrix=matrix, gemma=False)
    assert len(needed) == 2
