"""The likeliest tokens of a row against torch: scores, noise, ties, values that are no numbers;
then as samples of whole steps, beside samples of other modes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hetero_llm.cpu.executor import (
    CANDIDATES,
    GREEDY,
    LOGITS_ONLY,
    MOST_CANDIDATES,
    NOISY,
    Candidates,
    StepSamples,
)
from hetero_llm.demo_models import demo_folder
from hetero_llm.sampling.noise import gumbel_noise, signed_seed
from tests.cpu.csrc.step import row_kernels
from tests.cpu.csrc.step.row_kernels import Best, NoiseKey
from tests.cpu.csrc.step.test_executor import BEST, LEVELS, Part, Served

INFINITY, NAN = float("inf"), float("nan")
VOCABS = (1, 5, 16, 64, 67, 3001, 32000)
KEYS = (NoiseKey(1.0, 0, 0, 0), NoiseKey(0.7, 0xFEDCBA9876543210, 4095, 3))


def likeliest(scores: NDArray[np.float32], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of [N, vocab] scores, from the definition: lower tokens first where scores are equal."""
    tokens = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    log_probs = torch.from_numpy(scores).double().log_softmax(-1).numpy()
    return tokens, np.take_along_axis(log_probs, tokens, 1)


def ends_of(vocab: int, parts: int) -> list[int]:
    """Parts of which some may be empty, as a thread's share may be."""
    return [vocab * part // parts // 16 * 16 for part in range(1, parts)] + [vocab]


def noise_of(key: NoiseKey, vocab: int) -> NDArray[np.float32]:
    seed = torch.tensor([signed_seed(key.seed)])
    position, index = torch.tensor([key.position]), torch.tensor([key.sample_index])
    return gumbel_noise(seed, position, index, vocab)[0].numpy()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("vocab", VOCABS)
def test_equal_to_torch(library: ctypes.CDLL, vocab: int, parts: int, isa: int) -> None:
    for seed, count in enumerate((1, 2, 8, MOST_CANDIDATES)):
        rng = np.random.default_rng(seed)
        scores = rng.standard_normal(vocab, dtype=np.float32) * np.float32(3 + seed)
        tokens, log_probs = row_kernels.candidates(
            library, scores, count, ends=ends_of(vocab, parts), key=None, isa=isa
        )
        known = min(count, vocab)
        expected, values = likeliest(scores[None], known)
        np.testing.assert_array_equal(tokens[:known], expected[0])
        np.testing.assert_allclose(log_probs[:known], values[0], atol=3e-6, rtol=2e-7)
        assert (tokens[known:] == -1).all() and (log_probs[known:] == -INFINITY).all()


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_noise_is_that_of_noisy_draws(
    library: ctypes.CDLL, vocab: int, key: NoiseKey, isa: int
) -> None:
    scores = np.random.default_rng(vocab).standard_normal(vocab, dtype=np.float32) * 4
    count = min(8, vocab)
    tokens, log_probs = row_kernels.candidates(
        library, scores, count, ends=ends_of(vocab, 2), key=key, isa=isa
    )
    sampled = row_kernels.pick_noisy(library, scores, key, first=0, best=Best(), isa=isa)
    assert tokens[0] == sampled.token
    sums = scores / np.float32(key.temperature) + noise_of(key, vocab)
    all_values = torch.from_numpy(sums).double().log_softmax(-1).numpy()
    assert len(set(tokens.tolist())) == count
    np.testing.assert_allclose(log_probs, all_values[tokens], atol=1e-5)
    np.testing.assert_allclose(log_probs, np.sort(all_values)[::-1][:count], atol=1e-5)


def test_equal_scores_come_in_the_order_of_their_tokens(library: ctypes.CDLL, isa: int) -> None:
    rng = np.random.default_rng(0)
    for vocab in (40, 333, 4096):
        scores = rng.integers(0, 3, vocab).astype(np.float32)
        for parts in (1, 4):
            tokens, log_probs = row_kernels.candidates(
                library, scores, 16, ends=ends_of(vocab, parts), key=None, isa=isa
            )
            expected, values = likeliest(scores[None], 16)
            np.testing.assert_array_equal(tokens, expected[0])
            np.testing.assert_allclose(log_probs, values[0], atol=3e-6)


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_scores_far_apart(library: ctypes.CDLL, order: str, isa: int) -> None:
    """Every score a new best, or none after the first; sums that must neither overflow nor stay."""
    scores = np.linspace(-9e4, 9e4, 1000, dtype=np.float32)
    if order == "descending":
        scores = scores[::-1].copy()
    tokens, log_probs = row_kernels.candidates(
        library, scores, 3, ends=ends_of(1000, 3), key=None, isa=isa
    )
    best = [999, 998, 997] if order == "ascending" else [0, 1, 2]
    assert tokens.tolist() == best and log_probs[0] == 0
    np.testing.assert_allclose(log_probs, scores[best] - scores[best[0]])


@pytest.mark.parametrize("width", [1, 40, 64, 200])
def test_values_that_are_no_numbers(library: ctypes.CDLL, width: int, isa: int) -> None:
    """-infinity is no candidate; a row with NaN or +infinity has none, wherever it stands."""
    some = np.full(300, -INFINITY, np.float32)
    for at in (0, 150, 299):
        few = some.copy()
        few[at] = -2
        tokens, log_probs = row_kernels.candidates(
            library, few, 4, ends=[160, 300], key=None, isa=isa
        )
        assert tokens.tolist() == [at, -1, -1, -1]
        assert log_probs.tolist() == [0, -INFINITY, -INFINITY, -INFINITY]
    finite = np.random.default_rng(1).standard_normal(300, dtype=np.float32)
    for rest in (finite, some):
        for value in (NAN, INFINITY):
            for first in (0, 64, 300 - width):
                scores = rest.copy()
                scores[first : first + width] = value
                tokens, log_probs = row_kernels.candidates(
                    library, scores, 4, ends=[160, 300], key=None, isa=isa
                )
                assert (tokens == -1).all() and (log_probs == -INFINITY).all(), (value, first)
    tokens, _ = row_kernels.candidates(library, some, 4, ends=[300], key=None, isa=isa)
    assert (tokens == -1).all()


# -- as samples of a step -------------------------------------------------------------------------


def samples_of(rows: np.ndarray, modes: np.ndarray, temperatures: np.ndarray) -> StepSamples:
    count = len(rows)
    return StepSamples(
        token_indices=rows.astype(np.int32),
        modes=modes.astype(np.uint8),
        temperatures=temperatures.astype(np.float32),
        seeds=np.arange(count, dtype=np.uint64) + np.uint64(2**63 - 5),
        positions=(rows + 1).astype(np.int32),
        sample_indices=(np.arange(count) % 3).astype(np.int32),
    )


def scores_of(logits: torch.Tensor, samples: StepSamples) -> NDArray[np.float32]:
    """[N, vocab] scores, noise added where a sample's temperature is above 0."""
    chosen = logits[torch.from_numpy(samples.token_indices).long()]
    keys = torch.tensor([signed_seed(int(seed)) for seed in samples.seeds])
    positions, indices = (
        torch.from_numpy(a).long() for a in (samples.positions, samples.sample_indices)
    )
    noise = gumbel_noise(keys, positions, indices, logits.shape[1])
    heat = torch.from_numpy(samples.temperatures).unsqueeze(1)
    return torch.where(heat > 0, chosen / heat + noise, chosen).numpy()


def check_candidates(
    scores: NDArray[np.float32], heat: NDArray[np.float32], tokens: np.ndarray, found: np.ndarray
) -> None:
    """Exactly those of the logits; of noisy scores those of some within the noise's accuracy."""
    expected, values = likeliest(scores, tokens.shape[1])
    plain = heat == 0
    np.testing.assert_array_equal(tokens[plain], expected[plain])
    np.testing.assert_allclose(found, values, atol=1e-5)
    log_probs = torch.from_numpy(scores).double().log_softmax(-1).numpy()
    np.testing.assert_allclose(found, np.take_along_axis(log_probs, tokens, 1), atol=1e-5)
    assert all(len(set(row)) == tokens.shape[1] for row in tokens.tolist())


@pytest.fixture(scope="module")
def draft() -> Path:
    return demo_folder("demo-draft")


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weight_format", ["float", "bf16", "int8"])
def test_a_steps_candidates_are_those_of_its_logits(
    draft: Path, weight_format: str, isa: int
) -> None:
    served = Served(draft, weight_format, isa, 2, blocks=4)
    part = Part(3, 0, np.random.default_rng(0).integers(0, 4096, 60).tolist())
    logits = served.logits([part])
    for rows in (np.array([59]), np.arange(3), np.arange(60)):  # above 32 in larger tiles
        for temperature in (0.0, 0.8):
            heat = np.full(len(rows), temperature)
            samples = samples_of(rows, np.full(len(rows), CANDIDATES), heat)
            tokens, found = served.candidates(served.rows([part]), samples, 8)
            check_candidates(scores_of(logits, samples), samples.temperatures, tokens, found)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_beside_draws_of_other_modes(draft: Path, threads: int) -> None:
    """In prepared arrays, of which a step uses the first entries; the others stay as they are."""
    served = Served(draft, "bf16", BEST, threads, blocks=4)
    part = Part(3, 0, np.random.default_rng(1).integers(0, 4096, 50).tolist())
    rows, logits = served.rows([part]), served.logits([part])
    modes = np.resize([CANDIDATES, GREEDY, CANDIDATES, NOISY, LOGITS_ONLY], 40)
    heat = np.resize([0.0, 1.0, 0.7, 1.3, 1.0, 1.1, 1.0, 0.0, 0.9, 1.0], 40)
    samples = samples_of(np.arange(40) % 50, modes, heat)
    tokens = np.full(40, -7, np.int64)
    found = Candidates(np.full((40, 5), -7, np.int32), np.full((40, 5), 7, np.float32))
    prepared = served.executor.prepare(rows, samples, tokens, found)
    scores = scores_of(logits, samples)
    scores[modes == GREEDY] = logits[samples.token_indices[modes == GREEDY]].numpy()
    for count in (40, 7, 2):
        tokens[:], found.tokens[:], found.log_probs[:] = -7, -7, 7
        served.executor.run(prepared, 50, 1, count)
        mine = np.flatnonzero(modes[:count] == CANDIDATES)
        check_candidates(
            scores[mine], samples.temperatures[mine], found.tokens[mine], found.log_probs[mine]
        )
        sampled = np.flatnonzero(np.isin(modes[:count], (GREEDY, NOISY)))
        best = scores[sampled].max(1)
        assert (best - scores[sampled, tokens[sampled]] < 1e-5).all()
        for array, written in ((tokens, sampled), (found.tokens, mine)):
            assert (np.delete(array, written, 0) == -7).all()
        assert (np.delete(found.log_probs, mine, 0) == 7).all()


def test_a_token_sampled_with_noise_is_the_first_candidate(draft: Path) -> None:
    served = Served(draft, "int8", BEST, 2, blocks=4)
    part = Part(0, 0, np.random.default_rng(2).integers(0, 4096, 40).tolist())
    heat = np.full(40, 0.9)
    noisy = samples_of(np.arange(40), np.full(40, NOISY), heat)
    sampled = served.executor.step(served.rows([part]), noisy)
    wanted = samples_of(np.arange(40), np.full(40, CANDIDATES), heat)
    tokens, _ = served.candidates(served.rows([part]), wanted, 1)
    np.testing.assert_array_equal(tokens[:, 0], sampled)
