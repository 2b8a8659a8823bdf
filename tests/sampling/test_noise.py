"""The counter-based noise: published Philox vectors, the numpy reference, and its distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_llm.sampling.noise import gumbel_noise, philox, signed_seed

# Known-answer vectors of the Random123 distribution (philox4x32, 10 rounds).
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert [int(w) for w in words] == expected


def gumbel_noise_reference(seed: int, position: int, sample_index: int, token_id: int) -> float:
    """The noise for one token, written from the definition."""
    counter, mask = [token_id // 4, position, sample_index, 0], 0xFFFFFFFF
    key = [seed & mask, seed >> 32]
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            *((second >> 32) ^ counter[1] ^ key[0], second & mask),
            *((first >> 32) ^ counter[3] ^ key[1], first & mask),
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    x = np.float32(counter[token_id % 4])
    v = min((x + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1.0 - 2.0**-24))
    return float(-np.log(-np.log1p(-v)))


def test_torch_noise_equals_the_numpy_reference() -> None:
    rng = np.random.default_rng(0)
    seeds = [0, 1, 2**63, 2**64 - 1, *(int(s) for s in rng.integers(0, 2**63, 20))]
    positions = rng.integers(0, 1 << 20, len(seeds))
    indices = rng.integers(0, 64, len(seeds))
    noise = gumbel_noise(
        torch.tensor([signed_seed(s) for s in seeds]),
        torch.from_numpy(positions),
        torch.from_numpy(indices),
        1003,
    )
    assert noise.shape == (len(seeds), 1003)
    for row, seed in enumerate(seeds):
        for token in (0, 1, 2, 3, 4, 517, 1002):
            reference = gumbel_noise_reference(seed, int(positions[row]), int(indices[row]), token)
            # The counters agree to the bit; logarithms of two libraries may differ by an ulp.
            assert float(noise[row, token]) == pytest.approx(reference, rel=1e-5, abs=1e-5)


def test_noise_is_standard_gumbel() -> None:
    rows = torch.arange(200)
    noise = gumbel_noise(rows, rows * 0, rows * 0, 1000).flatten().double()
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, rel=0.02)


@pytest.mark.parametrize("changed", ["seed", "position", "sample"])
def test_every_part_of_the_key_changes_the_noise(changed: str) -> None:
    base = {"seed": 5, "position": 7, "sample": 1}
    other = base | {changed: base[changed] + 1}

    def noise_of(key: dict[str, int]) -> torch.Tensor:
        return gumbel_noise(*(torch.tensor([v]) for v in key.values()), 64)

    assert not torch.equal(noise_of(base), noise_of(other))
    assert torch.equal(noise_of(base), noise_of(base))
