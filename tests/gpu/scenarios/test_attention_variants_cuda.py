"""Attention beyond Llama's on a GPU: soft caps, ALiBi, sinks, alternating windows, odd heads and
groups.

The kernel with the tiles that the engine gives it against its reference in torch; then whole
models, judged token by token by transformers' eager attention in float32, with prefix hits and
draft trees.
"""

from __future__ import annotations

import dataclasses
import functools
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hetero_llm import SamplingParams
from hetero_llm.core.step_times import StepTimes
from hetero_llm.gpu.attention_context import AttentionContext
from hetero_llm.gpu.kernels.paged_attention import TileShape
from hetero_llm.spec_decode.proposal_account import ProposalAccount
from tests.gpu.kernels.test_paged_attention import Case, check, random_tree, run
from tests.gpu.scenarios import serving
from tests.gpu.scenarios.serving import TIES, generate, regrets, start

GPU = torch.device("cuda")
TREE = random_tree(np.random.default_rng(5), 64)
HEADS = {
    "71 on one": (71, 1, 64),
    "48 on one": (48, 1, 128),
    "16 on each": (32, 2, 64),
    "128 on one": (128, 1, 128),
    "of 80": (4, 4, 80),
    "of 96": (4, 2, 96),
    "of 112": (4, 2, 112),
    "of 160": (4, 4, 160),
    "of 256": (8, 1, 256),
}
SCORES: dict[str, dict[str, Any]] = {
    "soft cap": {"softcap": 0.7},
    "ALiBi": {"alibi": True},
    "sinks": {"sinks": 1.0},
    "all": {"softcap": 0.7, "alibi": True, "sinks": 1.0},
}


def tiles(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> dict[str, TileShape]:
    """Of every kind of step."""
    config: Any = SimpleNamespace(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        num_layers=0,
        sliding_windows=(),
        alibi_slopes=None,
    )
    context = AttentionContext(
        config,
        SimpleNamespace(scales=None, inverses=None),  # type: ignore[arg-type]
        torch.zeros(1, 1, device=GPU),
        dtype,
    )
    return {
        "few rows": context.decode_tile(8, short=False),
        "more rows": context.decode_tile(64, short=False),
        "short": context.decode_tile(8, short=True),
        "short and many": context.decode_tile(128, short=True),
        "chunks": context.chunk_tile(64),
        "long chunks": context.chunk_tile(512),
        "short trees": context.tree_tile(64, short=True),
        "trees": context.tree_tile(64, short=False),
        "many trees": context.tree_tile(512, short=False),
    }


def check_tiles(case: Case, chosen: set[str] | None = None) -> None:
    """The case's heads with each tile, on rows of the tile's kind."""
    checked = set()
    for name, tile in tiles(case.heads, case.kv_heads, case.dim, case.dtype).items():
        kind = "tree" if "trees" in name else "chunk" if "chunks" in name else "single"
        if (tile, kind == "tree") in checked or (chosen and name not in chosen):
            continue
        checked.add((tile, kind == "tree"))
        sequences: Any = {
            "single": [(700, 1, None), (0, 1, None), (64, 1, None)],
            "chunk": [(130, 33, None), (0, 20, None), (65, 1, None)],
            "tree": [(300, 64, TREE), (17, 9, TREE[:9]), (64, 1, None)],
        }[kind]
        check(dataclasses.replace(case, sequences=sequences, tile=tile), GPU)


def case_of(heads: str, **changes: Any) -> Case:
    num_heads, kv_heads, dim = HEADS[heads]
    case = Case([], heads=num_heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, parallel=9)
    return dataclasses.replace(case, **changes)


@pytest.mark.parametrize("heads", HEADS)
def test_every_tile_of_these_heads(heads: str) -> None:
    """Compiled as the engine compiles it: within shared memory, with the right result."""
    check_tiles(case_of(heads))


@pytest.mark.parametrize("heads", ["71 on one", "of 256"])
def test_every_tile_in_float32(heads: str) -> None:
    check_tiles(case_of(heads, dtype=torch.float32))


# A window meets all of them at once; each kind of scores meets the widest heads and one other.
@pytest.mark.parametrize(
    ("heads", "scores", "window"),
    [
        *product(("48 on one", "of 256"), SCORES, (None,)),
        *product(("71 on one", "48 on one", "of 80", "of 256"), ("all",), (100,)),
    ],
)
def test_scores_that_change(heads: str, scores: str, window: int | None) -> None:
    chosen = {"more rows", "chunks", "trees"}
    check_tiles(case_of(heads, window=window, **SCORES[scores]), chosen)


@pytest.mark.parametrize("scores", SCORES)
def test_scores_that_change_in_float32(scores: str) -> None:
    """To 1e-5, which bfloat16 does not show."""
    chosen = {"more rows", "chunks", "trees"}
    check_tiles(case_of("of 96", dtype=torch.float32, **SCORES[scores]), chosen)


@pytest.mark.parametrize("window", [None, 128])
def test_every_tile_with_sinks(window: int | None) -> None:
    """Heads of gpt-oss, in whole tiles and in cut ones."""
    for parallel in (9, 200):
        case = Case([], heads=64, kv_heads=8, dim=64, dtype=torch.bfloat16, parallel=parallel)
        check_tiles(dataclasses.replace(case, window=window, sinks=1.0))


def test_faint_sinks_change_no_bit_and_large_ones_take_all() -> None:
    sequences: Any = [(700, 1, None), (130, 33, None), (300, 64, TREE)]
    case = Case(sequences, heads=64, kv_heads=8, dtype=torch.bfloat16, parallel=9, tile_rows=32)
    without, _, _ = run(case, GPU)
    faint, _, _ = run(dataclasses.replace(case, sinks=float("-inf")), GPU)
    assert torch.equal(faint, without)
    outshone, _, _ = run(dataclasses.replace(case, sinks=1e4), GPU)
    assert not outshone.any()


@pytest.mark.parametrize("scores", SCORES)
def test_an_fp8_cache(scores: str) -> None:
    steps: list[Any] = [[(300, 1, None), (40, 20, None)], [(90, 12, TREE[:12])]]
    for sequences in steps:
        case = Case(
            sequences, dim=128, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, keys=64
        )
        check(dataclasses.replace(case, **SCORES[scores]), GPU)


def test_a_soft_cap_of_large_scores_is_the_cap() -> None:
    """Exponentials overflow on both sides, and what comes of it is finite."""
    case = Case([(130, 3, None), (9, 1, None)], dim=64, softcap=1e-3)
    check(case, GPU)


# -- whole models ---------------------------------------------------------------------------------

_IDS = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1}
_SIZES = {**_IDS, "hidden_size": 256, "num_hidden_layers": 3, "max_position_embeddings": 256}
_INNER = {**_SIZES, "intermediate_size": 608, "num_attention_heads": 4}
_GPT = {**_IDS, "n_layer": 3, "n_positions": 256}
_GEMMA2 = {
    **_INNER,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 8.0,
    "sliding_window": 24,
}
_STABLELM = {**_INNER, "hidden_size": 640, "num_key_value_heads": 4}
_OSS = {
    **_INNER,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
}
_FALCON = {**_SIZES, "hidden_size": 71 * 16, "num_attention_heads": 71, "ffn_hidden_size": 256}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ALiBi of 6 heads": ("Bloom", "ForCausalLM", {**_SIZES, "hidden_size": 192, "n_head": 6}),
    "71 heads on one": ("Falcon", "ForCausalLM", _FALCON),
    "48 heads on one": ("GPTBigCode", "ForCausalLM", {**_GPT, "n_embd": 768, "n_head": 48}),
    "soft caps, alternating windows": ("Gemma2", "ForCausalLM", _GEMMA2),
    "sinks, alternating windows": ("GptOss", "ForCausalLM", _OSS),
    "heads of 80": ("Phi", "ForCausalLM", {**_INNER, "hidden_size": 320}),
    "heads of 96": ("Phi3", "ForCausalLM", {**_INNER, "hidden_size": 384, "pad_token_id": 0}),
    "heads of 160": ("StableLm", "ForCausalLM", _STABLELM),
    "heads of 256": ("GPTJ", "ForCausalLM", {**_GPT, "n_embd": 1024, "n_head": 4}),
}


def make_model(folder: Path, name: str) -> Path:
    """A random model whose choices are clear: no two tokens are often near each other."""
    prefix, suffix, sizes = MODELS[name]
    config = getattr(transformers, prefix + "Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, prefix + suffix)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.2 * parameter.shape[1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@functools.cache
def eager_model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """transformers' other attentions leave soft caps out."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model.to(device).eval()


@pytest.fixture
def eager_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "transformers_model", eager_model)


@pytest.fixture
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is proposed is verified: a small model's steps would make the budget refuse most."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    monkeypatch.setattr(ProposalAccount, "set_step_times", lambda *_: None)


@pytest.mark.usefixtures("eager_reference", "whatever_it_costs")
@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path: Path, name: str) -> None:
    """Prompts in chunks and decoding, then with prefix hits and trees of the first answers."""
    folder = make_model(tmp_path, name)
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 7, 16, 17, 23, 33, 49, 100, 128, 200]
    prompts = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]
    params = [
        SamplingParams(
            temperature=0.7 * (i % 2), seed=i, max_tokens=24, ignore_eos=True, detokenize=False
        )
        for i in range(len(prompts))
    ]
    drafts = {"method": "lookahead", "cache_mode": 1, "token_paths_top_k": 2}
    engine = {"max_model_len": 256, "skip_tokenizer_init": True}
    with start(folder, speculative_config=drafts, **engine) as llm:
        outputs = generate(llm, prompts, params)
        cold = llm.metrics()["spec_decode_num_accepted_tokens"]
        again = generate(llm, prompts, params)
        warm = llm.metrics()["spec_decode_num_accepted_tokens"] - cold
    for found in (outputs, again):
        assert regrets(found, params, folder).max() < TIES
    assert warm > 20
