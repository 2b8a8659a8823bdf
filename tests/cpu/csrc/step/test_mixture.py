"""Mixtures of experts in the step: routes, every instruction set and weight format, and that no
token's result depends on threads or on the other tokens of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hetero_llm.cpu import native
from hetero_llm.cpu.executor import StepInput
from hetero_llm.models.experts import softmax_top_k
from tests.cpu.csrc.step.test_executor import BLOCK, VOCAB, Part, Served, reference, text

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled library")

SEQUENCES = 64
FORMATS = ("float", "bf16", "int8", "int4")
# Of 90% of the tokens: rounding lets the others choose another expert.
TOLERANCE = {"float": 1e-4, "bf16": 0.1, "int8": 0.5, "int4": 3.0}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Sizes that are no multiples of a strip or of a panel, and a layer without experts. Torch has
    one thread: more would get in the executor's way on a small machine."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    models = {
        "mixtral": transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **_SIZES, num_hidden_layers=2, num_local_experts=5, intermediate_size=104
            )
        ),
        "qwen2_moe": transformers.Qwen2MoeForCausalLM(
            transformers.Qwen2MoeConfig(
                **_SIZES,
                num_hidden_layers=3,
                num_experts=18,
                num_experts_per_tok=4,
                moe_intermediate_size=40,
                shared_expert_intermediate_size=88,
                intermediate_size=200,
                mlp_only_layers=[1],
                norm_topk_prob=False,
            )
        ),
    }
    parent = tmp_path_factory.mktemp("mixtures")
    for name, model in models.items():
        model.to(torch.bfloat16).float().save_pretrained(parent / name)  # bf16 weights are exact
    yield {name: parent / name for name in models}
    torch.set_num_threads(before)


# -- routes ----------------------------------------------------------------------------------------


def route(library: ctypes.CDLL, logits: np.ndarray, k: int, renormalize: bool) -> tuple[
    np.ndarray, np.ndarray
]:  # fmt: skip
    rows, experts = logits.shape
    ids, weights = np.full((rows, k), -1, np.int32), np.empty((rows, k), np.float32)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (ids, weights))
    counts = (ctypes.c_int64(n) for n in (rows, experts, k, int(renormalize)))
    library.hetero_mixture_route(logits.ctypes.data_as(ctypes.c_void_p), *counts, *pointers)
    return ids, weights


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 2), (60, 4), (64, 8), (7, 7)])
def test_routes_are_those_of_torch(
    library: ctypes.CDLL, experts: int, k: int, renormalize: bool
) -> None:
    rng = np.random.default_rng(experts + k)
    logits = (3 * rng.standard_normal((50, experts))).astype(np.float32)
    ids, weights = route(library, logits, k, renormalize)
    expected = softmax_top_k(torch.from_numpy(logits), k, renormalize=renormalize, rounded=False)
    np.testing.assert_array_equal(ids, expected[0].numpy())
    np.testing.assert_allclose(weights, expected[1].numpy(), rtol=1e-5)


def test_equal_logits_choose_the_lowest_experts(library: ctypes.CDLL) -> None:
    logits = np.array([[1, 2, 2, 0, 2, 1], [0, 0, 0, 0, 0, 0]], np.float32)
    assert route(library, logits, 4, True)[0].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_nan_chooses_experts_that_there_are(library: ctypes.CDLL) -> None:
    """Its own token becomes NaN, and nothing else."""
    logits = np.zeros((3, 6), np.float32)
    logits[0], logits[1, 2], logits[2, 0] = np.nan, np.nan, np.nan
    ids, weights = route(library, logits, 3, False)
    assert ((ids >= 0) & (ids < 6)).all() and all(len(set(row)) == 3 for row in ids.tolist())
    assert np.isnan(weights).all()


# -- steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_chunks_trees_and_single_tokens(
    folders: dict[str, Path], family: str, weight_format: str, isa: int, library: ctypes.CDLL
) -> None:
    """Prompts in chunks, then a step with every kind of tokens."""
    folder = folders[family]
    served = Served(folder, weight_format, isa, 2, library=library)
    texts = {slot: text(slot, length) for slot, length in enumerate((150, 41, 20, 33))}
    first = served.logits([Part(0, 0, texts[0][:149]), Part(1, 0, texts[1][:40])])
    parents = [0, 0, 1, 2, 2, 3, 0, 7]
    tree = Part(1, 40, text(9, 9), parents)
    second = served.logits(
        [Part(0, 149, texts[0][149:]), tree, Part(2, 0, texts[2]), Part(3, 0, texts[3])]
    )
    expected = [*reference(folder, texts[0])[:149], *reference(folder, texts[1])[:40]]
    expected.append(reference(folder, texts[0])[149])
    for row in range(9):
        path = [row]
        while path[-1]:
            path.append(parents[path[-1] - 1])
        known = [*texts[1][:40], *(tree.tokens[r] for r in reversed(path))]
        expected.append(reference(folder, known)[-1])
    expected += [*reference(folder, texts[2]), *reference(folder, texts[3])]
    errors = (torch.cat((first, second)) - torch.stack(expected)).abs().amax(1)
    assert len(errors) == 189 + 63
    limit = errors.max() if weight_format == "float" else errors.quantile(0.9)
    assert limit < TOLERANCE[weight_format], (float(limit), float(errors.mean()))


def first_tokens(served: Served, tokens: np.ndarray) -> np.ndarray:
    """Logits after each of these tokens as the only one of a sequence."""
    count = len(tokens)
    zeros = np.zeros(count, np.int32)
    tables = np.random.default_rng(count).permutation(SEQUENCES).astype(np.int32)[:count, None]
    inputs = StepInput(
        tokens.astype(np.int32), zeros, tables[:, 0] * BLOCK, np.arange(count, dtype=np.int32),
        zeros, np.ones(count, np.int32), zeros, np.zeros(count, np.uint8),
        np.zeros(count, np.uint64), np.ascontiguousarray(tables),
    )  # fmt: skip
    return served.executor.logits(inputs, np.arange(count)).numpy()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_tokens_result_does_not_depend_on_threads_or_neighbours(
    folders: dict[str, Path], weight_format: str, isa: int, library: ctypes.CDLL
) -> None:
    """To the bit: 1 to 64 tokens, those of a step all alike (most experts have none) among them."""
    folder = folders["qwen2_moe"]
    rng = np.random.default_rng(1)
    served = [
        Served(folder, weight_format, isa, threads, blocks=8, library=library) for threads in (1, 3)
    ]
    alone = np.concatenate([first_tokens(served[0], np.array([t])) for t in range(20)])
    for count in (1, 2, 3, 5, 8, 13, 33, 64):
        tokens = rng.integers(0, 20, count)
        for each in served:
            np.testing.assert_array_equal(first_tokens(each, tokens), alone[tokens])
    alike = np.full(64, 7)
    for each in served:
        np.testing.assert_array_equal(first_tokens(each, alike), alone[alike])


@pytest.mark.parametrize("threads", [1, 2, 5, 16])
def test_any_number_of_threads(folders: dict[str, Path], threads: int) -> None:
    """More threads than there are panels, or tokens."""
    for folder in folders.values():
        served = Served(folder, "float", -1, threads)
        tokens = text(5, 90)
        ours = torch.cat(
            [served.logits([Part(0, 0, tokens[:89])]), served.logits([Part(0, 89, tokens[89:])])]
        )
        assert (ours - reference(folder, tokens)).abs().max() < TOLERANCE["float"]


@pytest.mark.parametrize("threads", [1, 4])
def test_more_tokens_than_a_block_of_rows(folders: dict[str, Path], threads: int) -> None:
    for folder in folders.values():
        served = Served(folder, "float", -1, threads, blocks=64)
        tokens = text(6, 700)
        ours = served.logits([Part(2, 0, tokens)])
        assert (ours - reference(folder, tokens)).abs().max() < TOLERANCE["float"]
