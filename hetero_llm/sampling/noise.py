"""Counter-based Gumbel noise: a sample depends on its key alone, never on the batch.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) with
key = the 64-bit seed and counter = (token id // 4, position, sample index, 0); the output word
token id % 4 belongs to the token. With x that word, v = (x + 0.5) / 2**32 in float32, kept below 1,
and g = -log(-log1p(-v)) is standard Gumbel noise. argmax(log p + g) is a sample from p (the
Gumbel-max trick), so one key gives one token: the same in any batch, chunking or draft tree.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def philox(
    counters: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    keys: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words and broadcast together.

    Products wrap modulo 2**64, whose bits are those of the unsigned product, so masking after the
    shift gives the high word on any device without unsigned types.
    """
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(_ROUNDS):
        first = c0 * _MULTIPLIERS[0]
        second = c2 * _MULTIPLIERS[1]
        c0 = ((second >> 32) & _MASK) ^ c1 ^ k0
        c1 = second & _MASK
        c2 = ((first >> 32) & _MASK) ^ c3 ^ k1
        c3 = first & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, sample_indices: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Noise for every token of each row.

    Args:
        seeds: [R] int64, the bits of the unsigned 64-bit seeds.
        positions: [R] int64, absolute position of the token to be sampled.
        sample_indices: [R] int64, index of the sample among the request's `n`.

    Returns:
        [R, vocab_size] float32.
    """
    rows = len(seeds)
    lanes = torch.arange(-(-vocab_size // 4), device=seeds.device).unsqueeze(0)
    zero = torch.zeros_like(lanes)
    words = philox(
        (lanes, positions.unsqueeze(1), sample_indices.unsqueeze(1), zero),
        ((seeds & _MASK).unsqueeze(1), ((seeds >> 32) & _MASK).unsqueeze(1)),
    )
    x = torch.stack(words, dim=-1).view(rows, -1)[:, :vocab_size]
    v = ((x.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return -torch.log(-torch.log1p(-v))


def signed_seed(seed: int) -> int:
    """The bits of an unsigned 64-bit seed as the int64 that tensors hold."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
