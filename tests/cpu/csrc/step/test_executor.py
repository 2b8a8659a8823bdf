"""The whole step against transformers in float32: every instruction set, weight format and mix of
rows; what int8 weights cost in perplexity."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hetero_llm.cpu import native
from hetero_llm.cpu.executor import (
    CANDIDATES,
    GREEDY,
    NOISY,
    Candidates,
    Executor,
    SampleMasks,
    StepInput,
    StepSamples,
)
from hetero_llm.demo_models import demo_folder, heldout_prompts
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.sampling.noise import gumbel_noise, signed_seed

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled library")

BLOCK, POSITIONS, VOCAB = 16, 4224, 203
LEVELS = range(native.isa_level() + 1) if native.load() is not None else range(1)
BEST = LEVELS[-1]
# Of logits with a standard deviation of 0.7: float sums; products of bf16 (transformers' own bf16
# errs by 0.03 here); 8-bit weights and inputs; 4-bit weights.
TOLERANCE = {"float": 1e-4, "bf16": 0.03, "int8": 0.2, "int4": 1.5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that are no multiples of a strip or of a panel."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=POSITIONS,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("odd")
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)  # so bf16 weights are exact
    model.float().save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Part:
    """Rows of one sequence: `tokens` behind `start` cached ones; parents: of a tree's rows."""

    slot: int
    start: int
    tokens: list[int]
    parents: list[int] | None = None


class Served:
    """An executor with blocks of its own for each of eight sequences."""

    def __init__(
        self,
        folder: Path,
        weight_format: str,
        isa: int,
        threads: int,
        blocks: int = 34,
        library: ctypes.CDLL | None = None,
    ) -> None:
        config = load_model_config(folder)
        dtype = torch.float32 if weight_format == "float" else torch.bfloat16
        model = load_model(folder, config, dtype=dtype, device="cpu", show_progress=False)
        shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, dtype)
        order = np.random.default_rng(1).permutation(8 * blocks)
        self.tables = np.ascontiguousarray(order.reshape(8, blocks), dtype=np.int32)
        cache = PagedKVCache(shape, 8 * blocks, torch.device("cpu"))
        library = library or native.load()
        assert library is not None
        self.executor = Executor(
            model, config, cache, library=library, threads=threads, cpus=None,
            weight_format=weight_format, isa=isa,
        )  # fmt: skip

    def rows(self, parts: Sequence[Part]) -> StepInput:
        positions: list[int] = []
        places: list[int] = []
        ancestors: list[int] = []
        for part in parts:
            depth, bits = [0], [1]
            for row, parent in enumerate(part.parents or [], 1):
                depth.append(depth[parent] + 1)
                bits.append(bits[parent] | 1 << row)
            for row in range(len(part.tokens)):
                at = part.start + row
                positions.append(part.start + depth[row] if part.parents else at)
                places.append(int(self.tables[part.slot, at // BLOCK]) * BLOCK + at % BLOCK)
                ancestors.append(bits[row] if part.parents else 0)
        return StepInput(
            np.array([t for part in parts for t in part.tokens], np.int32),
            np.array(positions, np.int32),
            np.array(places, np.int32),
            np.array([part.slot for part in parts], np.int32),
            np.array([part.start for part in parts], np.int32),
            np.array([len(part.tokens) for part in parts], np.int32),
            np.array([part.start for part in parts], np.int32),
            np.array([part.parents is not None for part in parts], np.uint8),
            np.array(ancestors, np.uint64),
            self.tables,
        )

    def logits(self, parts: Sequence[Part]) -> torch.Tensor:
        rows = self.rows(parts)
        return self.executor.logits(rows, np.arange(len(rows.token_ids)))

    def candidates(
        self, rows: StepInput, samples: StepSamples, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens and log-probabilities of `Candidates`."""
        num_samples, tokens = len(samples.modes), np.zeros(0, np.int64)
        found = Candidates.empty(num_samples, count)
        step = self.executor.prepare(rows, samples, tokens, found)
        self.executor.run(step, len(rows.token_ids), len(rows.request_slots), num_samples)
        return found.tokens, found.log_probs


@lru_cache(maxsize=2)
def reference_model(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference(folder: Path, token_ids: list[int]) -> torch.Tensor:
    return _reference(folder, tuple(token_ids))


@lru_cache(maxsize=64)
@torch.inference_mode()
def _reference(folder: Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    """[len, vocab], the same for all parametrizations."""
    return reference_model(folder)(torch.tensor([token_ids])).logits[0]


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def path_to(part: Part, row: int) -> list[int]:
    """Tokens of a tree row's path, the root's first."""
    assert part.parents is not None
    rows = [row]
    while rows[-1]:
        rows.append(part.parents[rows[-1] - 1])
    return [part.tokens[r] for r in reversed(rows)]


def check(folder: Path, served: Served, tolerance: float) -> None:
    """Prompts in chunks, then a step that holds every kind of rows."""
    texts = {slot: text(slot, length) for slot, length in enumerate((301, 77, 20, 70, 150))}
    begin = [
        Part(0, 0, texts[0][:300]),
        Part(1, 0, texts[1][:40]),
        Part(2, 0, texts[2]),
        Part(4, 0, texts[4][:149]),
    ]
    first = served.logits(begin)
    row = 0
    for part in begin:
        expected = reference(folder, texts[part.slot])[: len(part.tokens)]
        ours = first[row : row + len(part.tokens)]
        assert (ours - expected).abs().max() < tolerance, part.slot
        row += len(part.tokens)
    tree = Part(2, 20, text(9, 9), [0, 0, 1, 2, 2, 3, 0, 7])
    mixed = [
        Part(0, 300, texts[0][300:]),
        tree,
        Part(1, 40, texts[1][40:]),
        Part(3, 0, texts[3]),
        Part(4, 149, texts[4][149:]),
    ]
    ours = served.logits(mixed)
    row = 0
    for part in mixed:
        for within in range(len(part.tokens)):
            if part is tree:
                known = [*texts[2], *path_to(tree, within)]
                expected = reference(folder, known)[-1]
            else:
                expected = reference(folder, texts[part.slot])[part.start + within]
            error = float((ours[row] - expected).abs().max())
            assert error < tolerance, (part.slot, within, error)
            row += 1


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weight_format", ["float", "bf16", "int8", "int4"])
def test_every_kind_of_rows(checkpoint: Path, weight_format: str, isa: int) -> None:
    check(checkpoint, Served(checkpoint, weight_format, isa, 2), TOLERANCE[weight_format])


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_any_number_of_threads(checkpoint: Path, threads: int) -> None:
    check(checkpoint, Served(checkpoint, "float", BEST, threads), TOLERANCE["float"])


def test_threads_that_the_system_refuses_are_not_missed(checkpoint: Path) -> None:
    """A child of a fork makes threads of its own. If it may not, the caller computes all."""
    served = Served(checkpoint, "float", BEST, 4, blocks=64)
    tokens = text(8, 901)
    served.logits([Part(0, 0, tokens[:900])])
    last = Part(0, 900, tokens[900:])
    expected = served.logits([last])  # its context is cut
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:
            os.setuid(65534)  # the limit does not hold for root
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        error = (served.logits([last]) - expected).abs().max()
        os._exit(0 if error < TOLERANCE["float"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("weight_format", ["float", "bf16"])
def test_long_contexts(checkpoint: Path, weight_format: str) -> None:
    served = Served(checkpoint, weight_format, BEST, 2, blocks=POSITIONS // BLOCK)
    tokens = text(3, 4200)
    for start in range(0, 4096, 1024):
        served.logits([Part(5, start, tokens[start : start + 1024])])
    expected = reference(checkpoint, tokens)
    single = served.logits([Part(5, 4096, tokens[4096:4097])])
    chunk = served.logits([Part(5, 4097, tokens[4097:])])
    tolerance = TOLERANCE[weight_format]
    assert (single - expected[4096:4097]).abs().max() < tolerance
    assert (chunk - expected[4097:]).abs().max() < tolerance


def test_draws_are_those_of_the_logits(checkpoint: Path) -> None:
    served = Served(checkpoint, "bf16", BEST, 2)
    prompt = text(4, 50)
    part = Part(6, 0, prompt)
    logits = served.logits([part])
    rows = np.repeat(np.arange(0, 50, 7, dtype=np.int32), 3)
    count = len(rows)
    modes = np.tile(np.array([GREEDY, NOISY, NOISY], np.uint8), count // 3)
    temperatures = np.tile(np.array([1.0, 0.7, 1.3], np.float32), count // 3)
    seeds = np.arange(count, dtype=np.uint64) + np.uint64(2**63 - 5)
    positions, indices = rows + 1, (np.arange(count) % 3).astype(np.int32)
    sampled = served.executor.step(
        served.rows([part]), StepSamples(rows, modes, temperatures, seeds, positions, indices)
    )
    chosen = logits[torch.from_numpy(rows).long()]
    keys = torch.tensor([signed_seed(int(seed)) for seed in seeds])
    noise = gumbel_noise(
        keys, torch.from_numpy(positions).long(), torch.from_numpy(indices).long(), VOCAB
    )
    noisy = torch.from_numpy(modes == NOISY).unsqueeze(1)
    scores = torch.where(
        noisy, chosen / torch.from_numpy(temperatures).unsqueeze(1) + noise, chosen
    )
    best = scores.max(dim=-1).values
    assert (best - scores.gather(1, torch.from_numpy(sampled).unsqueeze(1))[:, 0]).max() < 1e-5
    assert len(set(sampled.tolist())) > 5


def masks_of(allowed: np.ndarray) -> np.ndarray:
    """Token masks [R, words] of [R, vocab] bool."""
    rows, vocab = allowed.shape
    padded = np.zeros((rows, -(-vocab // 32) * 32), bool)
    padded[:, :vocab] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("guided", ["all", "some"])
def test_masked_samples_are_those_of_the_masked_logits(
    checkpoint: Path, guided: str, threads: int, isa: int
) -> None:
    """Greedy, noisy and candidates. Dense masks, and masks that forbid whole strips of tokens,
    which the head then leaves out."""
    served = Served(checkpoint, "bf16", isa, threads)
    part = Part(6, 0, text(4, 40))
    inputs = served.rows([part])
    after = np.arange(0, 40, 2, dtype=np.int32)
    count = len(after)
    rng = np.random.default_rng(5)
    allowed = rng.random((count, VOCAB)) < 0.3
    allowed[1::2] = np.isin(np.arange(VOCAB), [17, 18, 200])
    allowed[7] = np.arange(VOCAB) == 202
    rows = np.full(count, -1, np.int32)
    chosen = np.arange(count) if guided == "all" else np.arange(0, count, 3)
    rows[chosen] = chosen[::-1]
    words = np.ascontiguousarray(masks_of(allowed))
    unmasked = np.where(rows >= 0, allowed[rows].T, True).T
    logits = served.executor.logits(inputs, after).numpy()
    masked = np.where(unmasked, logits, -np.inf)

    zeros, ones = np.zeros(count, np.int32), np.ones(count, np.float32)
    masks = SampleMasks(rows, words)
    seeds, positions = np.arange(count, dtype=np.uint64), after + np.int32(1)

    def samples(mode: int) -> StepSamples:
        modes = np.full(count, mode, np.uint8)
        return StepSamples(after, modes, ones, seeds, positions, zeros, masks)

    greedy = served.executor.step(inputs, samples(GREEDY))
    assert greedy.tolist() == masked.argmax(axis=1).tolist()
    noise = gumbel_noise(
        torch.from_numpy(seeds.astype(np.int64)),
        torch.from_numpy(positions).long(),
        torch.from_numpy(zeros).long(),
        VOCAB,
    ).numpy()
    noisy = served.executor.step(inputs, samples(NOISY))
    sums = masked + noise
    best = np.take_along_axis(sums, noisy[:, None], 1)[:, 0]
    assert (sums.max(axis=1) - best).max() < 1e-5
    tokens, log_probs = served.candidates(inputs, samples(CANDIDATES), 4)
    scores = torch.from_numpy(sums).log_softmax(dim=-1)
    for row in range(count):
        known = min(4, int(unmasked[row].sum()))
        expected = scores[row].topk(known)
        assert tokens[row, :known].tolist() == expected.indices.tolist()
        np.testing.assert_allclose(log_probs[row, :known], expected.values, atol=1e-4)
        assert (tokens[row, known:] == -1).all()
    np.testing.assert_array_equal(served.executor.logits(inputs, after).numpy(), logits)


def test_a_mask_that_allows_nothing_samples_token_0(checkpoint: Path) -> None:
    served = Served(checkpoint, "float", BEST, 2)
    inputs, two = served.rows([Part(0, 0, text(1, 9))]), np.zeros(2, np.int32)
    samples = StepSamples(
        np.array([3, 8], np.int32),
        np.array([GREEDY, NOISY], np.uint8),
        np.ones(2, np.float32),
        np.zeros(2, np.uint64),
        two,
        two,
        SampleMasks(two, np.zeros((1, -(-VOCAB // 32)), np.int32)),
    )
    assert served.executor.step(inputs, samples).tolist() == [0, 0]


def test_rounded_weights_keep_the_perplexity_of_the_demo_target() -> None:
    """Of 4 bits as much as a model of 8 million parameters lets them: a plain rounding over each
    group's range costs 7%."""
    prompts = heldout_prompts().prompts[:6, :384].astype(np.int64)
    losses = {}
    for weight_format in ("bf16", "int8", "int4"):
        served = Served(demo_folder("demo"), weight_format, BEST, 2, blocks=24)
        parts = []
        for tokens in prompts:
            logits = served.logits([Part(0, 0, tokens.tolist())])
            following = torch.from_numpy(tokens[1:])
            parts.append(torch.nn.functional.cross_entropy(logits[:-1], following))
        losses[weight_format] = float(torch.stack(parts).mean())
    assert abs(np.exp(losses["int8"] - losses["bf16"]) - 1) < 0.01, losses
    assert 0 < np.exp(losses["int4"] - losses["bf16"]) - 1 < 0.07, losses
