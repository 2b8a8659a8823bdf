"""Row-wise parts of a step against torch, for every instruction set of the machine."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hetero_llm.sampling.noise import gumbel_noise, signed_seed
from tests.cpu.csrc.step import row_kernels
from tests.cpu.csrc.step.references import ref_round
from tests.cpu.csrc.step.row_kernels import Best, NoiseKey

SIZES = (1, 3, 8, 16, 17, 63, 64, 100, 768, 1001)
INFINITY = float("inf")


def random(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def assert_near(ours: NDArray[np.float32], expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        torch.from_numpy(ours).double(), expected, rtol=tolerance, atol=1e-37
    )


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(library: ctypes.CDLL, size: int, isa: int) -> None:
    x, weight = random(1, size) * 3, random(2, size)
    for eps in (1e-5, 0.5):
        ours = row_kernels.rms_norm(library, x, weight, eps=eps, isa=isa)
        wide = torch.from_numpy(x).double()
        expected = wide / (wide.square().mean() + eps).sqrt() * torch.from_numpy(weight)
        assert_near(ours, expected, 1e-6)


@pytest.mark.parametrize(("size", "rotary"), [(64, 64), (128, 32), (80, 20), (8, 2), (40, 40)])
def test_rotation_turns_pairs_of_halves(
    library: ctypes.CDLL, size: int, rotary: int, isa: int
) -> None:
    head, angles = random(1, size), random(2, rotary // 2)
    factors = np.concatenate((np.cos(angles), np.sin(angles)))
    ours = row_kernels.rotate(library, head, factors, isa=isa)
    half = rotary // 2
    pairs = (head[:half] + 1j * head[half:rotary]) * np.exp(1j * angles.astype(np.float64))
    np.testing.assert_allclose(ours[:half], pairs.real, atol=1e-6)
    np.testing.assert_allclose(ours[half:rotary], pairs.imag, atol=1e-6)
    np.testing.assert_array_equal(ours[rotary:], head[rotary:])


@pytest.mark.parametrize("kind", range(3), ids=row_kernels.ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 16, 37, 6001])
def test_gated(library: ctypes.CDLL, size: int, kind: int, isa: int) -> None:
    gate = np.linspace(-12, 12, size, dtype=np.float32) if size > 1 else random(3, 1)
    up = random(4, size)
    ours = row_kernels.gated(
        library, np.stack((up, gate)), np.stack((gate, up)), kind=kind, isa=isa
    )
    ours = ours[1]
    wide = torch.from_numpy(gate).double()
    activated = (
        torch.nn.functional.silu(wide),
        wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3)),
        wide * torch.special.erfc(-wide / math.sqrt(2)) / 2,
    )[kind]
    if kind == 1:  # torch's own loses its tail to 1 + tanh
        torch.testing.assert_close(
            activated, torch.nn.functional.gelu(wide, approximate="tanh"), rtol=0, atol=1e-14
        )
    # The exponent of a tail is rounded once, so its relative error grows with its size.
    tolerance = (1 + wide.square() * (kind > 0) + wide.abs()) * 5e-7
    error = (torch.from_numpy(ours) - activated * torch.from_numpy(up)).abs()
    scale = (activated * torch.from_numpy(up)).abs()
    assert (error <= tolerance * scale + 1e-30).all()


@pytest.mark.parametrize("kind", range(3), ids=row_kernels.ACTIVATIONS)
def test_gates_of_any_size_stay_finite(library: ctypes.CDLL, kind: int, isa: int) -> None:
    gate = np.array([-3e4, -200, -100, 100, 200, 3e4], np.float32)
    ours = row_kernels.gated(library, gate[None], np.ones((1, 6), np.float32), kind=kind, isa=isa)
    np.testing.assert_array_equal(ours[0], np.maximum(gate, 0))


@pytest.mark.parametrize("size", SIZES)
def test_add(library: ctypes.CDLL, size: int, isa: int) -> None:
    x, y = random(1, size), random(2, size)
    np.testing.assert_array_equal(row_kernels.add(library, x, y, isa=isa), x + y)


@pytest.mark.parametrize("size", SIZES)
def test_add_block(library: ctypes.CDLL, size: int, isa: int) -> None:
    x, y, bias = random(1, 3 * size), random(2, 3 * size), random(3, size)
    x, y = x.reshape(3, size), y.reshape(3, size)
    ours = row_kernels.add_block(library, x, y, bias, isa=isa)
    np.testing.assert_allclose(ours, x + (y + bias), rtol=1e-6, atol=1e-6)


def test_every_bf16_is_widened_and_narrowed(library: ctypes.CDLL, isa: int) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)[:-1]
    wide = row_kernels.widen(library, bits, isa=isa)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(wide.view(np.uint32), expected.view(np.uint32))
    numbers = ~np.isnan(wide)
    np.testing.assert_array_equal(
        row_kernels.narrow(library, wide, isa=isa)[numbers], bits[numbers]
    )


@pytest.mark.parametrize("size", SIZES)
def test_narrow_rounds_to_nearest_even(library: ctypes.CDLL, size: int, isa: int) -> None:
    bits = np.random.default_rng(size).integers(0, 1 << 32, size, dtype=np.uint32)
    bits[::3] = bits[::3] & 0xFFFF0000 | 0x8000  # ties
    bits[::7] = 0x7FFFFFFF  # NaN that a carry would turn into a number
    x = bits.view(np.float32)
    np.testing.assert_array_equal(row_kernels.narrow(library, x, isa=isa), ref_round(x))


@pytest.mark.parametrize("size", [*SIZES, 32003])
def test_greedy_takes_the_lowest_token_of_the_best(
    library: ctypes.CDLL, size: int, isa: int
) -> None:
    scores = np.rint(random(size, size) * 2)  # many ties
    ours = row_kernels.pick_greedy(library, scores, first=100, best=Best(), isa=isa)
    assert ours == Best(float(scores.max()), 100 + int(scores.argmax()))


def test_greedy_goes_on_where_it_stopped(library: ctypes.CDLL, isa: int) -> None:
    scores = np.rint(random(9, 5000) * 2)
    pieces = [(0, 70), (70, 71), (71, 1000), (1000, 5000)]
    for order in (pieces, pieces[::-1]):
        best = Best()
        for begin, end in order:
            best = row_kernels.pick_greedy(
                library, scores[begin:end].copy(), first=begin, best=best, isa=isa
            )
        assert best == Best(float(scores.max()), int(scores.argmax()))


@pytest.mark.parametrize(
    ("scores", "token"),
    [
        ([-1.0, -0.0, 0.0, -2.0], 1),
        ([-1.0, 0.0, -0.0, -2.0], 1),
        ([-INFINITY] * 70, 0),
        ([math.nan] * 5, 0),
        ([-INFINITY] * 40 + [-3e38], 40),
        ([0.0] * 33 + [INFINITY] * 20, 33),
    ],
)
def test_greedy_of_special_values(
    library: ctypes.CDLL, scores: list[float], token: int, isa: int
) -> None:
    values = np.array(scores, np.float32)
    assert row_kernels.pick_greedy(library, values, first=0, best=Best(), isa=isa).token == token


KEYS = (
    NoiseKey(1.0, 0, 0, 0),
    NoiseKey(0.7, 0xFEDCBA9876543210, 4095, 3),
    NoiseKey(2.5, 1 << 63, (1 << 31) - 1, 1),
)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_noise_equals_its_twin(library: ctypes.CDLL, key: NoiseKey, isa: int) -> None:
    """A score above all others makes a token win with the sum that holds its noise."""
    vocab = 1024
    expected = noise_of(key, vocab)
    for token in range(0, vocab, 7):
        scores = np.full(vocab, -INFINITY, np.float32)
        scores[token] = 0
        ours = row_kernels.pick_noisy(library, scores, key, first=0, best=Best(), isa=isa)
        assert ours.token == token
        assert abs(ours.score - expected[token]) < 2e-6


def noise_of(key: NoiseKey, vocab: int) -> NDArray[np.float32]:
    return gumbel_noise(
        torch.tensor([signed_seed(key.seed)]),
        torch.tensor([key.position]),
        torch.tensor([key.sample_index]),
        vocab,
    )[0].numpy()


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 64, 67, 3001, 128256])
def test_noisy_takes_the_best_sum(
    library: ctypes.CDLL, vocab: int, key: NoiseKey, isa: int
) -> None:
    scores = random(vocab, vocab) * 4
    sums = scores / np.float32(key.temperature) + noise_of(key, vocab)
    expected = Best(float(sums.max()), int(sums.argmax()))
    whole = row_kernels.pick_noisy(library, scores, key, first=0, best=Best(), isa=isa)
    assert whole.token == expected.token
    assert abs(whole.score - expected.score) < 4e-6
    best, cut = Best(), vocab // 2 // 4 * 4
    for begin, end in ((0, cut), (cut, vocab)):
        if begin < end:
            best = row_kernels.pick_noisy(
                library, scores[begin:end].copy(), key, first=begin, best=best, isa=isa
            )
    assert best == whole


def test_the_largest_and_smallest_noise(library: ctypes.CDLL, isa: int) -> None:
    """Over many draws with equal scores the best are large; with one token, small ones occur."""
    for seed in range(6):
        key = NoiseKey(1.0, seed, seed, 0)
        noise = noise_of(key, 131072)
        scores = np.zeros(131072, np.float32)
        ours = row_kernels.pick_noisy(library, scores, key, first=0, best=Best(), isa=isa)
        assert ours.token == int(noise.argmax()) and abs(ours.score - noise.max()) < 2e-6
        lowest = int(noise.argmin()) // 4 * 4
        least = scores[:4] - INFINITY
        least[int(noise.argmin()) - lowest] = 0
        ours = row_kernels.pick_noisy(library, least, key, first=lowest, best=Best(), isa=isa)
        assert ours.token == int(noise.argmin()) and abs(ours.score - noise.min()) < 2e-6


def mask_of(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Token mask of [vocab] bool, from the definition."""
    words = np.zeros(-(-len(allowed) // 32), np.uint32)
    for token in np.flatnonzero(allowed).tolist():
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


@pytest.mark.parametrize("first", [0, 16, 32, 112])
@pytest.mark.parametrize("size", SIZES)
def test_forbid(library: ctypes.CDLL, size: int, first: int, isa: int) -> None:
    allowed = np.random.default_rng(size).random(first + size) < 0.4
    scores = random(3, size)
    scores[::5] = math.nan
    ours = row_kernels.forbid(library, scores, mask_of(allowed), first=first, isa=isa)
    np.testing.assert_array_equal(ours, np.where(allowed[first:], scores, -INFINITY))


def test_allows_any(library: ctypes.CDLL) -> None:
    for token in (0, 15, 16, 31, 32, 63, 64, 95):
        mask = mask_of(np.arange(96) == token)
        for first in range(0, 96, 16):
            for size in (1, 16, 17, 32, 33, 96 - first):
                size = min(size, 96 - first)
                expected = first <= token < first + size
                assert row_kernels.allows_any(library, mask, first=first, size=size) == expected
