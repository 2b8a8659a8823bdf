"""sample_tokens against its reference, the reference against the Sampler, noise words bit by
bit."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence
from hetero_llm.gpu.kernels.sample import (
    MaskPlaces,
    SampleRows,
    gumbel,
    make_mask_places,
    make_sample_workspace,
    noise_words,
    pack_rows,
    sample_tokens,
    sample_tokens_reference,
)
from hetero_llm.sampling.noise import gumbel_noise, philox
from hetero_llm.sampling.sampler import Sampler

OFF_P = 2.0
TOLERANCE = 1e-5  # of a sum of probabilities, and of a noisy score


def make_rows(device: torch.device, count: int, vocab: int, seed: int = 0, **fields) -> SampleRows:
    """Rows that sample without restriction at temperature 1, but for `fields`."""
    rng = np.random.default_rng(seed)
    values = {
        "temperature": np.ones(count),
        "top_k": np.full(count, vocab),
        "top_p": np.full(count, OFF_P),
        "min_p": np.zeros(count),
        "seeds": rng.integers(-(2**63), 2**63 - 1, count),
        "sample_indices": rng.integers(0, 4, count),
        "positions": np.arange(count) + 1000,
    }
    for name, value in fields.items():
        values[name] = np.broadcast_to(np.asarray(value), (count,))
    first = [values.pop(name) for name in ("temperature", "top_k", "top_p")]
    return SampleRows(torch.from_numpy(pack_rows(*first, **values)).to(device))


def rows_for(device: torch.device, few: int) -> int:
    """The interpreter takes a tenth of a second for a row."""
    return few if device.type == "cpu" else 8 * few


def with_top_p(rows: SampleRows, change: float) -> SampleRows:
    packed = rows.packed.clone()
    packed[2] = (packed[2].view(torch.float32) + change).view(torch.int32)
    return replace(rows, packed=packed)


def scaled_and_noise(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    packed = rows.packed.long()
    temperature = rows.packed[0].view(torch.float32)
    seeds = (packed[4] & 0xFFFFFFFF) | (packed[5] << 32)
    noise = gumbel_noise(seeds, packed[7].clamp(min=0), packed[6], logits.shape[1])
    return torch.where(
        (temperature > 0).unsqueeze(1), logits.float() / temperature.unsqueeze(1) + noise, logits
    )


def check(logits: torch.Tensor, rows: SampleRows, *, capacity: int = 2048) -> torch.Tensor:
    """Ours equals the reference, but where rounding decides: two equal scores, a border of
    top-p."""
    workspace = make_sample_workspace(*logits.shape, logits.device, capacity=capacity)
    tokens = sample_tokens(logits, rows, workspace)
    expected = sample_tokens_reference(logits, rows)
    differ = (tokens != expected).nonzero().flatten().tolist()
    if differ:
        borders = [sample_tokens_reference(logits, with_top_p(rows, x)) for x in (-1e-5, 1e-5)]
        noisy = scaled_and_noise(logits, rows)
    for row in differ:
        ours, other = int(tokens[row]), int(expected[row])
        close = abs(float(noisy[row, ours] - noisy[row, other])) < TOLERANCE
        moved = any(int(border[row]) == ours for border in borders)
        assert close or moved, f"row {row}: {ours}, expected {other}"
    assert len(differ) <= max(1, len(tokens) // 20)
    return tokens


def random_logits(device, rows: int, vocab: int, dtype=torch.float32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, vocab, generator=generator) * scale
    return values.to(device=device, dtype=dtype)


@triton.jit(do_not_specialize=["key_low", "key_high", "sample_index", "position"])
def store_noise(words, noise, key_low, key_high, sample_index, position, LANES: tl.constexpr):
    sampled = noise_words(tl.arange(0, LANES), key_low, key_high, sample_index, position)
    token = tl.arange(0, 4 * LANES)
    tl.store(words + token, sampled.to(tl.int32, bitcast=True))
    tl.store(noise + token, gumbel(sampled))


@pytest.mark.parametrize("seed", [0, 1, -1, 0x0123456789ABCDEF, -(2**63)])
def test_words_are_exact_and_noise_within_rounding(device: torch.device, seed: int) -> None:
    position, sample_index, lanes = 131071, 3, 1024
    low, high = np.array([seed], np.int64).view(np.int32).tolist()
    words = torch.empty(4 * lanes, dtype=torch.int32, device=device)
    noise = torch.empty(4 * lanes, dtype=torch.float32, device=device)
    parameters = torch.tensor([low, high, sample_index, position], dtype=torch.int32).tolist()
    store_noise[(1,)](words, noise, *parameters, LANES=lanes)
    lane = torch.arange(lanes)
    fixed = [torch.full_like(lane, value) for value in (position, sample_index, 0)]
    keys = [torch.full_like(lane, value & 0xFFFFFFFF) for value in (low, high)]
    expected = torch.stack(philox((lane, *fixed), tuple(keys)), dim=-1).flatten()
    assert torch.equal(words.cpu().long() & 0xFFFFFFFF, expected)
    exact = gumbel_noise(
        torch.tensor([seed]), torch.tensor([position]), torch.tensor([sample_index]), 4 * lanes
    )[0]
    assert (noise.cpu() - exact).abs().max() < 2e-6


def test_noise_at_both_ends_of_the_words(device: torch.device) -> None:
    """The largest noise comes from the smallest words, where log(1 - v) has lost its digits."""
    values = [0, 1, 2, 3, 127, 255, 256, 1 << 12, 1 << 20, (1 << 32) - 1, (1 << 32) - 129, 1 << 31]
    words = torch.tensor(values + [0] * 4, dtype=torch.int64)

    noise = torch.empty(len(words), dtype=torch.float32, device=device)
    signed = words.to(torch.int32).to(device)
    store_gumbel[(1,)](noise, signed, SIZE=len(words))
    v = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    exact = -torch.log(-torch.log1p(-v))
    assert (noise.cpu().double() - exact).abs().max() < 2e-6


@triton.jit
def store_gumbel(noise, words, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    sampled = tl.load(words + index).to(tl.uint32, bitcast=True)
    tl.store(noise + index, gumbel(sampled))


def test_twin_draws_what_the_sampler_draws(device: torch.device) -> None:
    vocab = 1000
    choices = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=20),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=0.9, min_p=0.05),
        SamplingParams(temperature=1.1, top_k=30, top_p=0.9, min_p=0.01),
    ]
    sampler = Sampler(len(choices), vocab, device)
    seeds = [7, 2**64 - 5, 3, 4, 5, 2**63 + 11]
    for slot, (params, seed) in enumerate(zip(choices, seeds, strict=True)):
        sampler.admit(AdmittedSequence(slot, (1, 2), 2, params, seed, slot % 3))
    slots = np.tile(np.arange(len(choices)), rows_for(device, 2))
    positions = np.arange(len(slots)) + 5
    logits = random_logits(device, len(slots), vocab)
    expected = sampler.sample(logits, slots, positions, np.ones_like(slots)).token_ids
    fields = {
        "temperature": [p.temperature for p in choices],
        "top_k": [p.top_k if p.top_k > 0 else vocab for p in choices],
        "top_p": [p.top_p for p in choices],
        "min_p": [p.min_p for p in choices],
        "seeds": np.array(seeds, np.uint64).view(np.int64),
        "sample_indices": np.arange(len(choices)) % 3,
    }
    fields = {name: np.asarray(value)[slots] for name, value in fields.items()}
    rows = make_rows(device, len(slots), vocab, positions=positions, **fields)
    assert torch.equal(sample_tokens_reference(logits, rows), expected)
    check(logits, rows)


@pytest.mark.parametrize("capacity", [2048, 64])
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(1000, torch.float32), (4099, torch.bfloat16), (5000, torch.float16)],
)
def test_any_mix_of_rows(
    device: torch.device, vocab: int, dtype: torch.dtype, capacity: int
) -> None:
    """A capacity of 64 sends wide supports through the passes over the vocabulary."""
    count = rows_for(device, 6)
    rng = np.random.default_rng(vocab)
    rows = make_rows(
        device,
        count,
        vocab,
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5], count),
        top_k=rng.choice([1, 2, 50, vocab // 2, vocab, vocab], count),
        top_p=rng.choice([0.1, 0.5, 0.95, 0.999, 1.0, OFF_P], count),
        min_p=rng.choice([0.0, 0.0, 0.02, 1.0], count),
        positions=np.where(rng.random(count) < 0.1, -1, np.arange(count)),
    )
    scale = rng.choice([0.1, 1.0, 4.0], (count, 1)).astype(np.float32)
    logits = random_logits(device, count, vocab, torch.float32, 1.0) * torch.tensor(
        scale, device=device
    )
    check(logits.to(dtype), rows, capacity=capacity)


VOCAB = 47 * 32
FLAT = -1e-4 * np.arange(VOCAB)  # scores in descending order
PEAKED = np.where(np.arange(VOCAB) < 12, 5.0 - 0.02 * np.arange(VOCAB), -20.0)
STEPS = np.repeat([5.0, 4.0, -20.0], [40, 40, VOCAB - 80]) - 1e-5 * np.arange(VOCAB)


def share(scores: np.ndarray, size: int, of: int = VOCAB) -> float:
    """A top_p that `size` tokens reach and `size - 1` do not, among the first `of`."""
    masses = np.exp(scores[:of])
    return (masses[:size].sum() - masses[size - 1] / 2) / masses.sum()


# scores, size of the support, top_k, top_p, min_p
BORDERS = [
    (FLAT, 2, 2, OFF_P, 0.0),
    (FLAT, 700, 700, OFF_P, 0.0),
    (FLAT, 3, VOCAB, share(FLAT, 3), 0.0),
    (FLAT, 700, VOCAB, share(FLAT, 700), 0.0),
    (FLAT, 480, VOCAB, share(FLAT, 480), 0.0),
    (FLAT, 60, 100, share(FLAT, 60, 100), 0.0),
    (FLAT, 40, VOCAB, OFF_P, np.exp(FLAT[39] - 5e-5)),
    (FLAT, 50, VOCAB, share(FLAT, 50, 200), np.exp(FLAT[199] - 5e-5)),
    (FLAT, 30, 300, share(FLAT, 30, 200), np.exp(FLAT[199] - 5e-5)),
    (PEAKED, 10, VOCAB, share(PEAKED, 10), 0.0),
    (STEPS, 40, 40, OFF_P, 0.0),
]


@pytest.mark.parametrize("capacity", [2048, 32])
def test_borders_of_the_support(device: torch.device, capacity: int) -> None:
    """The token with the most noise is the last inside the support, or the first outside."""
    count = 2 * len(BORDERS)
    scores, sizes, top_k, top_p, min_p = zip(*(BORDERS + BORDERS), strict=True)
    rows = make_rows(device, count, VOCAB, top_k=top_k, top_p=top_p, min_p=min_p)
    noise = scaled_and_noise(torch.zeros(count, VOCAB, device=device), rows)
    noisiest = noise.argmax(dim=1).cpu().numpy()
    logits = np.empty((count, VOCAB), np.float32)
    for row in range(count):
        outside = row >= len(BORDERS)
        order = np.arange(VOCAB)  # the best tokens share few blocks
        if scores[row] is not STEPS:
            order = order.reshape(-1, 32).T.flatten()  # have blocks of their own
        rank = sizes[row] if outside else sizes[row] - 1
        other = np.flatnonzero(order == noisiest[row])[0]
        order[[rank, other]] = order[[other, rank]]
        logits[row, order] = scores[row]
    on_device = torch.from_numpy(logits).to(device)
    workspace = make_sample_workspace(count, VOCAB, device, capacity=capacity)
    sampled = sample_tokens(on_device, rows, workspace)
    assert torch.equal(sampled, sample_tokens_reference(on_device, rows))
    hit = sampled.cpu().numpy() == noisiest
    assert hit.tolist() == [True] * len(BORDERS) + [False] * len(BORDERS)


@pytest.mark.parametrize("capacity", [2048, 32])
def test_ties(device: torch.device, capacity: int) -> None:
    """All ties at the top-k threshold stay; top-p takes the first ids that reach it."""
    count = 8
    logits = torch.zeros(count, VOCAB, device=device)
    logits[:, ::2] = -0.0  # equal to 0.0, though its bits are not
    logits[6, 700:705] = 1.0
    logits[7, 700:] = -1.0
    top_k = np.array([5, 5, VOCAB, VOCAB, VOCAB, VOCAB, VOCAB, 800])
    rows = make_rows(device, count, VOCAB, top_k=top_k)
    noisiest = scaled_and_noise(torch.zeros_like(logits), rows).argmax(dim=1).cpu().numpy()
    assert noisiest[:2].min() >= 5
    # Rows 2 and 3: top-p ends with the noisiest token; 4 and 5: just before it.
    top_p = np.array([OFF_P, OFF_P, 0.5, 0.5, -0.5, -0.5, 0.4, 0.9])
    top_p[2:6] = (noisiest[2:6] + top_p[2:6]) / VOCAB
    rows = make_rows(device, count, VOCAB, top_k=top_k, top_p=top_p)
    sampled = check(logits, rows, capacity=capacity).cpu().numpy()
    assert (sampled[:4] == noisiest[:4]).all() and (sampled[4:6] < noisiest[4:6]).all()
    greedy = make_rows(device, 1, VOCAB, temperature=0.0)
    assert check(logits[:1], greedy).tolist() == [0]


def test_extreme_parameters(device: torch.device) -> None:
    vocab, count = 1000, 8
    logits = random_logits(device, count, vocab)
    rows = make_rows(
        device,
        count,
        vocab,
        temperature=[1e-5, 1, 1, 1, 100, 1, 1, 1],
        top_k=[vocab, vocab, vocab, 1, vocab, vocab - 1, vocab - 1, vocab],
        top_p=[2, 1e-6, 2, 2, 0.999999, 2, 0.9999, 2],
        min_p=[0, 0, 1, 0, 0, 0, 0, 1e-30],
    )
    sampled = check(logits, rows, capacity=32)
    assert torch.equal(sampled[:4], logits[:4].argmax(dim=1))


def test_logits_that_are_no_numbers(device: torch.device) -> None:
    vocab = 1030
    logits = random_logits(device, 6, vocab)
    logits[0] = float("-inf")
    logits[1] = float("nan")
    logits[2, 1025] = float("inf")
    logits[3, 5:] = float("-inf")
    logits[4, ::3] = float("nan")
    logits[5, 7] = float("inf")
    logits[5, 3] = float("nan")
    cases = (
        {"temperature": 0.0},
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"top_k": 900, "min_p": 0.1},
    )
    workspace = make_sample_workspace(6, vocab, device, capacity=32)
    for fields in cases:
        rows = make_rows(device, 6, vocab, **fields)
        picked = sample_tokens(logits, rows, workspace).tolist()
        assert picked[:3] == [0, 0, 1025] and picked[5] == 7
        assert picked[3:5] == sample_tokens_reference(logits, rows).tolist()[3:5]
        assert picked[3] < 5 and picked[4] % 3 != 0


def test_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    vocab, count = 3000, 6
    logits = random_logits(device, count, vocab, torch.bfloat16)
    rows = make_rows(
        device, count, vocab, top_k=[vocab, 40, vocab, 40, vocab, 7], top_p=[2, 2, 0.9, 0.9, 0.5, 1]
    )
    workspace = make_sample_workspace(count, vocab, device, capacity=32)
    together = sample_tokens(logits, rows, workspace).tolist()
    for row in range(count):
        alone = SampleRows(rows.packed[:, row : row + 1].contiguous())
        assert (
            sample_tokens(logits[row : row + 1], alone, workspace).tolist()
            == together[row : row + 1]
        )


def test_padding_slots_and_strides(device: torch.device) -> None:
    vocab, count = 1000, 5
    wide = random_logits(device, count + 1, vocab + 24, torch.bfloat16)
    logits = wide[1:, :vocab]
    rows = make_rows(
        device,
        count + 3,  # room for a larger step
        vocab,
        temperature=[0, 1, 1, 0, 1, 1, 1, 1],
        top_k=[vocab, 9, vocab, vocab, 9, 1, 1, 1],
        positions=[3, 4, -1, -1, 5, 6, 7, 8],
    )
    workspace = make_sample_workspace(count + 3, vocab, device)
    slots = torch.tensor([4, -1, 2, -1, 0, 1, 1, 1], dtype=torch.int32, device=device)
    last = torch.full((6,), -7, device=device)
    reference = last.clone()
    out = torch.empty(count, dtype=torch.int64, device=device)
    tokens = sample_tokens(logits, rows, workspace, slots=slots, last_tokens=last, out=out)
    expected = sample_tokens_reference(logits, rows, slots=slots, last_tokens=reference)
    assert tokens is out and torch.equal(tokens, expected) and torch.equal(last, reference)
    assert tokens[2] == 0 and last[1] == -7 and last[4] == tokens[0] != 0
    assert last[2] == 0  # a padding row that names a slot writes its 0


def test_wrapper_refuses_what_does_not_fit(device: torch.device) -> None:
    logits = random_logits(device, 2, 100)
    rows = make_rows(device, 2, 100)
    with pytest.raises(AssertionError):
        sample_tokens(logits, rows, make_sample_workspace(1, 100, device))
    with pytest.raises(AssertionError):
        sample_tokens(logits, rows, make_sample_workspace(2, 101, device))
    with pytest.raises(AssertionError):
        sample_tokens(logits.T.contiguous().T, rows, make_sample_workspace(2, 100, device))


# -- token masks ----------------------------------------------------------------------------------


def places_of(device: torch.device, allowed: np.ndarray, most_looks: int = 3) -> MaskPlaces:
    """Places that hold masks of [P, vocab] bool, all ready."""
    count, vocab = allowed.shape
    places = make_mask_places(count, vocab, pin=device.type == "cuda", most_looks=most_looks)
    padded = np.zeros((count, -(-vocab // 32) * 32), bool)
    padded[:, :vocab] = allowed
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    places.words.copy_(torch.from_numpy(words))
    places.ready.fill_(1)
    return places


def random_masks(count: int, vocab: int, seed: int = 0) -> np.ndarray:
    """[count, vocab] bool: dense, sparse and single tokens in turn; none at the ends of chunks."""
    rng = np.random.default_rng(seed)
    allowed = rng.random((count, vocab)) < 0.5
    allowed[1::3] = rng.random((len(allowed[1::3]), vocab)) < 0.01
    allowed[1::3, -1] = True
    allowed[2::3] = False
    allowed[np.arange(2, count, 3), rng.integers(0, vocab, len(allowed[2::3]))] = True
    return allowed


@pytest.mark.parametrize(
    ("vocab", "dtype", "capacity"),
    [(1000, torch.float32, 64), (4099, torch.bfloat16, 2048), (2500, torch.float16, 64)],
)
def test_masked_rows_are_rows_of_masked_logits(
    device: torch.device, vocab: int, dtype: torch.dtype, capacity: int
) -> None:
    count = rows_for(device, 7)
    rng = np.random.default_rng(vocab)
    allowed = random_masks(count, vocab, seed=vocab)
    where = np.where(np.arange(count) % 4 == 3, -1, rng.permutation(count))
    rows = make_rows(
        device,
        count,
        vocab,
        temperature=rng.choice([0.0, 0.3, 1.0], count),
        top_k=rng.choice([1, 50, vocab, vocab], count),
        top_p=rng.choice([0.5, 0.95, OFF_P], count),
        min_p=rng.choice([0.0, 0.0, 0.02], count),
        positions=np.where(rng.random(count) < 0.1, -1, np.arange(count)),
        mask_places=where,
    )
    logits = random_logits(device, count, vocab, dtype)
    forbidden = torch.from_numpy(~allowed[where] & (where >= 0)[:, None]).to(device)
    masked = logits.masked_fill(forbidden, float("-inf"))
    places = places_of(device, allowed)
    expected = sample_tokens_reference(logits, rows, masks=places)
    assert torch.equal(expected, sample_tokens_reference(masked, rows))
    plain = check(masked, rows, capacity=capacity)
    workspace = make_sample_workspace(count, vocab, device, capacity=capacity)
    before = logits.clone()
    tokens = sample_tokens(logits, rows, workspace, masks=places)
    assert torch.equal(tokens, plain)
    unmasked = torch.from_numpy(where < 0).to(device)
    assert torch.equal(logits[unmasked], before[unmasked])
    assert not places.gave_up.any()
    for row, place in enumerate(where.tolist()):
        if place >= 0 and rows.packed[7, row] >= 0:
            assert allowed[place, int(tokens[row])]


def test_masks_are_left_alone_by_rows_without_one(device: torch.device) -> None:
    """Of places that are not ready a row without a mask reads nothing, so it does not wait."""
    vocab = 2000
    logits = random_logits(device, 3, vocab)
    rows = make_rows(device, 3, vocab, temperature=[0.0, 1.0, 1.0], top_k=[vocab, vocab, 9])
    places = places_of(device, np.zeros((3, vocab), bool), most_looks=2**31 - 2)
    places.ready.zero_()
    workspace = make_sample_workspace(3, vocab, device)
    tokens = sample_tokens(logits, rows, workspace, masks=places)
    assert torch.equal(tokens, sample_tokens_reference(logits, rows))
    padding = make_rows(device, 3, vocab, positions=-1, mask_places=[0, 1, 2])
    assert sample_tokens(logits, padding, workspace, masks=places).tolist() == [0, 0, 0]
    assert not places.gave_up.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_nothing_gives_token_0(device: torch.device, temperature: float) -> None:
    vocab = 1030
    logits = random_logits(device, 2, vocab)
    places = places_of(device, np.zeros((1, vocab), bool))
    rows = make_rows(
        device, 2, vocab, temperature=temperature, top_k=[vocab, 5], mask_places=[0, 0]
    )
    workspace = make_sample_workspace(2, vocab, device)
    assert sample_tokens(logits, rows, workspace, masks=places).tolist() == [0, 0]


def test_a_row_whose_mask_never_comes_says_so(device: torch.device) -> None:
    """The others of the step get theirs."""
    vocab, count = 3000, 4
    allowed = random_masks(count, vocab)
    places = places_of(device, allowed, most_looks=5)
    places.ready[1] = places.ready[3] = 0
    logits = random_logits(device, count, vocab)
    rows = make_rows(
        device, count, vocab, temperature=[0, 0, 1, 1], mask_places=[0, 1, 2, 3],
        top_k=[vocab, vocab, 40, 40],
    )  # fmt: skip
    reference = replace(places, gave_up=places.gave_up.clone())
    expected = sample_tokens_reference(logits, rows, masks=reference)
    workspace = make_sample_workspace(count, vocab, device)
    tokens = sample_tokens(logits, rows, workspace, masks=places).tolist()
    assert places.gave_up.tolist() == reference.gave_up.tolist() == [0, 1, 0, 1]
    assert tokens[0] == int(expected[0]) and tokens[2] == int(expected[2])
    assert all(0 <= token < vocab for token in tokens)


def test_more_rows_than_one_look_takes(device: torch.device) -> None:
    """Masks of all rows arrive, those that never come are told apart, and one deadline serves."""
    vocab, count = 40, 300
    allowed = np.zeros((count, vocab), bool)
    allowed[np.arange(count), np.arange(count) % vocab] = True
    places = places_of(device, allowed, most_looks=5)
    places.ready[[130, 299]] = 0
    rows = make_rows(device, count, vocab, temperature=0.0, mask_places=np.arange(count)[::-1])
    logits = random_logits(device, count, vocab)
    best = logits.argmax(dim=-1).tolist()
    workspace = make_sample_workspace(count, vocab, device)
    tokens = sample_tokens(logits, rows, workspace, masks=places).tolist()
    assert places.gave_up.nonzero().flatten().tolist() == [130, 299]
    late = {count - 1 - 130, count - 1 - 299}
    expected = [best[i] if i in late else (count - 1 - i) % vocab for i in range(count)]
    assert tokens == expected


def test_a_row_waits_for_a_mask_that_comes_late(device: torch.device) -> None:
    vocab = 2000
    allowed = np.arange(vocab)[None] == 1234
    places = places_of(device, allowed, most_looks=2**31 - 2)
    rows = make_rows(device, 1, vocab, temperature=0.0, mask_places=[0])
    logits = random_logits(device, 1, vocab)
    workspace = make_sample_workspace(1, vocab, device)
    assert sample_tokens(logits, rows, workspace, masks=places).tolist() == [1234]  # compiled now
    words = places.words.clone()
    places.words.fill_(-1)
    places.ready.zero_()

    def write() -> None:
        places.words.copy_(words)
        places.ready[0] = 1

    thread = threading.Timer(0.05, write)
    thread.start()
    tokens = sample_tokens(logits, rows, workspace, masks=places)
    assert tokens.tolist() == [1234] and not places.gave_up.any()
    thread.join()


def test_wrapper_refuses_masks_that_do_not_fit(device: torch.device) -> None:
    logits = random_logits(device, 2, 100)
    rows = make_rows(device, 2, 100)
    workspace = make_sample_workspace(2, 100, device)
    for vocab in (96, 129):
        with pytest.raises(AssertionError):
            sample_tokens(logits, rows, workspace, masks=make_mask_places(2, vocab, pin=False))


@pytest.mark.gpu
def test_one_captured_graph_serves_rows_with_and_without_masks(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    vocab, count = 128256, 8
    logits = random_logits(device, count, vocab, torch.bfloat16)
    rows = make_rows(device, count, vocab, temperature=0.0)
    places = places_of(device, random_masks(count, vocab), most_looks=1 << 20)
    workspace = make_sample_workspace(count, vocab, device)
    source = logits.clone()
    out = sample_tokens(logits, rows, workspace, masks=places)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_tokens(logits, rows, workspace, masks=places, out=out)
    for seed, where in enumerate(([-1] * 8, list(range(8)), [-1, 3, -1, 2, 7, -1, 0, -1])):
        for fields in ({"temperature": 0.0}, {}, {"top_k": 50, "top_p": 0.95}):
            mix = make_rows(device, count, vocab, seed=seed, mask_places=where, **fields)
            rows.packed.copy_(mix.packed)
            logits.copy_(source)
            graph.replay()
            agreed = (out == sample_tokens_reference(source, mix, masks=places)).sum()
            assert agreed >= count - 1  # rounding may decide a row
    # Masks that come while the graph runs.
    rows.packed.copy_(make_rows(device, count, vocab, mask_places=list(range(8))).packed)
    for seed in range(50):
        logits.copy_(source)
        torch.cuda.synchronize()
        places.ready.zero_()
        places.words.zero_()
        rng = np.random.default_rng(seed)
        random = rng.integers(-(2**31), 2**31, places.words.shape).astype(np.int32)
        words = torch.from_numpy(random)
        graph.replay()
        places.words.copy_(words)
        places.ready.fill_(1)
        torch.cuda.synchronize()
        assert not places.gave_up.any()
        agreed = (out == sample_tokens_reference(source, rows, masks=places)).sum()
        assert agreed >= count - 1


@pytest.mark.gpu
def test_one_captured_graph_serves_any_mix(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    vocab, count = 128256, 8
    logits = random_logits(device, count, vocab, torch.bfloat16)
    rows = make_rows(device, count, vocab, temperature=0.0)
    workspace = make_sample_workspace(count, vocab, device)
    out = sample_tokens(logits, rows, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_tokens(logits, rows, workspace, out=out)
    mixes = (
        make_rows(device, count, vocab, seed=1),
        make_rows(device, count, vocab, seed=2, top_k=50, top_p=0.95),
        make_rows(device, count, vocab, seed=3, top_p=[0.5, 0.95, 0.9, 2, 1, 0.99, 0.1, 0.7]),
        make_rows(device, count, vocab, seed=4, temperature=0.0),
    )
    for mix in mixes:
        rows.packed.copy_(mix.packed)
        graph.replay()
        agreed = (out == sample_tokens_reference(logits, mix)).sum()
        assert agreed >= count - 1  # rounding may decide a row
