"""Quantized models through captured graphs, drafts, the prefix cache, offload and preemption:
tokens are those of the plain weights that the quantized ones stand for, as transformers has them.
"""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_llm.gpu.kernels.quantized_experts import quantized_experts
from hetero_llm.gpu.kernels.quantized_gemm import prepare
from hetero_llm.gpu.kernels.routing import route_top_k
from hetero_llm.models.quantized_writer import write_quantized
from hetero_llm.quantization.matrix import KINDS, Kind, dequantize
from hetero_llm.quantization.names import ONLINE_NAMES, OnlineName
from hetero_llm.quantization.online import OnlineScheme
from tests.gpu.kernels.test_experts import CLAMPED, route
from tests.gpu.kernels.test_quantized_experts import check, stack_of
from tests.gpu.scenarios.serving import DEMO, GREEDY, TIES, generate, ragged, regrets, start
from tests.gpu.scenarios.test_lookahead_cuda import DRAFTERS, MIXED
from tests.models.mxfp4_checkpoints import make_both
from tests.models.test_quantized_weights import FORMATS, both


def plain_copy(folder: Path, scheme: OnlineScheme) -> Path:
    """The demo target with the weights that a way to quantize gives it."""
    shutil.copytree(DEMO, folder)
    tensors = load_file(folder / "model.safetensors")
    for key, weight in tensors.items():
        if key.endswith("_proj.weight"):
            matrix = scheme.convert({"weight": weight}, *weight.shape)
            tensors[key] = dequantize(matrix, torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def plain_copies(tmp_path_factory: pytest.TempPathFactory) -> dict[OnlineName, Path]:
    """For each way to quantize."""
    folder = tmp_path_factory.mktemp("plain")
    return {name: plain_copy(folder / name, OnlineScheme(name)) for name in ONLINE_NAMES}


@pytest.mark.parametrize("name", ONLINE_NAMES)
def test_float32_has_the_references_tokens(
    name: OnlineName, plain_copies: dict[OnlineName, Path]
) -> None:
    with start(quantization=name) as llm:
        outputs = generate(llm, ragged(8))
    assert regrets(outputs, [GREEDY] * 8, plain_copies[name]).max() < TIES


# Of many rows one way for each kind of product: `QuantizedProduct` has a test of every kind.
@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, 64) for name in ONLINE_NAMES] + [("fp8", 1024), ("fp8_block", 1024), ("int4", 1024)],
)
def test_bfloat16_differs_at_near_ties_only(
    name: OnlineName, rows: int, plain_copies: dict[OnlineName, Path]
) -> None:
    """Steps of few rows, and steps whose prompts make many."""
    with start(dtype="bfloat16", quantization=name, max_num_batched_tokens=rows) as llm:
        outputs = generate(llm, ragged(8))
    found = regrets(outputs, [GREEDY] * 8, plain_copies[name])
    assert (found < TIES).float().mean() > 0.9
    assert found.max() < (0.5 if rows == 64 else 1.5)  # many rows are quantized, too


@pytest.mark.parametrize(
    "engine",
    [
        {"speculative_config": DRAFTERS["hybrid"]},
        {"num_gpu_blocks_override": 40},
        {"enforce_eager": True, "batch_invariant": True},
        {"cpu_offload_gb": 0.002},
        {
            "enable_prefix_cache_offload": True,
            "cpu_prefill_memory_utilization": 0.02,
            "apc_offload_background_pin": False,
            "apc_offload_gpu_evictor_limit": 0,
        },  # fmt: skip
    ],
    ids=["drafts", "few blocks", "invariant", "weights on the host", "offload"],
)
def test_other_engines(engine: dict[str, Any], plain_copies: dict[OnlineName, Path]) -> None:
    with start(quantization="int4", **engine) as llm:
        outputs = generate(llm, ragged(), MIXED)
        again = generate(llm, ragged(), MIXED)
    for found in (outputs, again):
        assert regrets(found, MIXED, plain_copies["int4"]).max() < TIES


def test_a_written_copy_is_served(tmp_path: Path) -> None:
    """Which has one group for all of its matrices."""
    write_quantized(DEMO, tmp_path / "out", "int4", device="cuda")
    with start(tmp_path / "out") as llm:
        outputs = generate(llm, ragged(8))
    plain = plain_copy(tmp_path / "plain", OnlineScheme("int4", group=64))
    assert regrets(outputs, [GREEDY] * 8, plain).max() < TIES


def test_memory_is_that_of_the_quantized_model() -> None:
    """What weights take on the GPU, plain and quantized."""
    taken = {}
    for name in (None, "int4"):
        gc.collect()  # engines of other tests
        before = torch.cuda.memory_allocated()
        with start(dtype="bfloat16", quantization=name, num_gpu_blocks_override=40):
            taken[name] = torch.cuda.memory_allocated() - before
    matrices = 6 * (320 * 768 + 320 * 512 + 3 * 320 * 768)  # weights of the layers
    assert taken["int4"] is not None and taken[None] - taken["int4"] > matrices


@pytest.mark.parametrize("rows", [1, 4, 16, 100, 600])
def test_experts_of_gpt_oss(rows: int) -> None:
    """MXFP4 at its real sizes, with biases and a clamped gate: splits of K, blocks of all sizes."""
    device = torch.device("cuda")
    form: dict[str, Any] = {"group": 32, "scale_dtype": torch.bfloat16}
    gate_up = stack_of(device, 8, 2 * 2880, 2880, "fp4", **form)
    down = stack_of(device, 8, 2880, 2880, "fp4", **form)
    torch.manual_seed(rows)
    for dtype in (torch.bfloat16, torch.float16):
        first, second = (torch.randn(w.shape[:2], device=device) for w in (gate_up, down))
        x = torch.randn(rows, 2880, device=device).to(dtype)
        routes = route(device, rows, 8, 4)
        check(x, *routes, gate_up, down, CLAMPED, (first.to(dtype), second.to(dtype)))


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("gpt_oss", "mxfp4"),
        ("mixtral", "fp8 blocks"),
        ("mixtral", "gptq ordered"),
        ("qwen2_moe", "awq"),
        ("qwen2_moe", "nvfp4"),
        ("phimoe", "float-quantized"),
        ("qwen3_moe", "fp8 blocks"),
        ("glm4_moe", "fp8 blocks"),
        ("minimax_m2", "gptq"),
    ],
)
def test_mixtures(tmp_path: Path, family: str, form: str) -> None:
    """Experts in graphs, chunks and prefix hits: float32 meets dequantized weights, bfloat16 the
    kernels that read codes, in blocks of few pairs and of many."""
    if family == "gpt_oss":
        # The limit that transformers below 5.20 knows: it judges here.
        quantized, plain = make_both(tmp_path, changes={"swiglu_limit": 7.0})
    else:
        quantized, plain = both(tmp_path, FORMATS[form], family)
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 7, 16, 23, 33, 38]
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
    params = [GREEDY] * len(prompts)
    # Decoding of more rows has another attention kernel.
    settings: dict[str, Any] = {
        "max_model_len": 64, "max_num_seqs": 8, "skip_tokenizer_init": True,
    }  # fmt: skip
    with start(quantized, **settings) as llm:
        for _ in range(2):
            assert regrets(generate(llm, prompts, params), params, plain).max() < TIES
    drafts = {"speculative_config": DRAFTERS["ngram"]} if form == "awq" else {}
    with start(quantized, dtype="bfloat16", **settings, **drafts) as llm:
        found = regrets(generate(llm, prompts, params), params, plain)
        alone = regrets(generate(llm, prompts[-1:], params[:1]), params[:1], plain)
    # Rounding sends a few tokens to other experts, with torch on a CPU as well: 0.2 on average.
    assert found.median() < TIES and alone.median() < TIES and found.mean() < 0.5


@pytest.mark.parametrize(
    ("kind", "rows"),
    [(kind, 64) for kind in KINDS] + [(k, n) for k in ("fp8", "int4") for n in (1, 700)],
)
def test_experts_in_a_graph(device: torch.device, kind: Kind, rows: int) -> None:
    """Real sizes in bfloat16: right, captured once and replayed with other routes, and repeated to
    the bit."""
    form: dict[str, Any] = {"group": 64, "zeros": "zero"} if kind == "int4" else {}
    gate_up = stack_of(device, 8, 2 * 1408, 1024, kind, **form)
    down = stack_of(device, 8, 1024, 1408, kind, **form)
    x = torch.randn(rows, 1024, device=device, dtype=torch.bfloat16)
    logits = torch.randn(rows, 8, device=device)

    def routes() -> tuple[torch.Tensor, torch.Tensor]:
        return route_top_k(logits, k=2, renormalize=True, rounded=False)

    prepared = prepare(gate_up.matrix), prepare(down.matrix)
    check(x, *routes(), gate_up, down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = quantized_experts(x, *routes(), *prepared, activation="silu")
    for _ in range(3):
        logits.normal_()
        graph.replay()
        assert torch.equal(y, check(x, *routes(), gate_up, down))
