"""Samples the next token of every row: argmax, or a noisy argmax within min-p, top-k and top-p,
of the tokens that the row's mask allows, if it has one.

Three kernels, whatever the mix of rows, without sorting and without asking the host:

1. `_await_masks`, one program, where rows may have masks: see below.
2. `_scan`, programs over (chunks of the vocabulary, rows): best score of each chunk; the score is
   the logit (greedy row) or logit / temperature + noise (unrestricted row). Of a restricted row it
   leaves the maxima of small blocks and the chunk's sum of exponentials instead.
3. `_finish`, a program per row: best of the chunks. In a restricted row the block maxima bound the
   support from below, which leaves few blocks to read; `_find_support` finds the thresholds there,
   and `sample_listed` takes the noisy argmax over the tokens beyond them.

Masks lie in page-locked host memory, which `_scan` reads: a chunk of a row is 128 bytes. The host
may write a mask while the step runs, and then sets the mask's flag. `_await_masks` looks at the
flags of all rows until they are set; the order of memory is that of `layer_ready`: the words, the
flag, the read of the flag and one fence here, then `_scan`, a later launch. (A fence in each
program of `_scan` cost 1.5 us for each, one after the other: 6 ms for 32 rows.) A row without a
mask reads nothing of them. In restricted rows `_scan` overwrites the logits of forbidden tokens
with -inf, so `_finish` knows no masks.

A row's token depends on its logits and parameters alone: no sum depends on the batch.

Search for thresholds. Scores are compared through int32 keys in the order of the floats. Top-k and
top-p ask the same question, for weights 1 and weights exp(score - highest): which is the smallest
key v with weight(keys > v) < target? Its answer is always the key of some token. The search bisects
the bits of v. A row of the vocabulary is cut into blocks of SUB tokens whose maxima are known;
blocks whose maximum is out of reach are never read ("listed" blocks are the others, in order of
token id). Bounds of a search: v is in (low, high], int64 so that low may be one below the smallest
key.

Wrapper `sample_tokens`, reference `sample_tokens_reference`; timed by `bench.kernels.sample`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import INTERPRETED, pdl_options, wait_and_release
from hetero_llm.gpu.kernels.layer_ready import MOST_LOOKS, see_what_came_before
from hetero_llm.sampling.noise import gumbel_noise
from hetero_llm.sampling.processors import restrict_support, unpack_mask

ROW_FIELDS = 9
"""int32 fields of a row, in the order of `pack_rows`'s arguments; a seed takes two."""
SAMPLE_INDEX, POSITION, MASK_PLACE = 6, 7, 8
"""Fields that a step sets for each row; the others are the request's. The last one is 1 + the place
of the row's mask, 0 for none: in a buffer that is not filled no row waits for one."""
CHUNK = 1024  # tokens of a partial result; part of the definition of a row's sums
SUB_BLOCK = 32
TILE = 4096  # tokens that a program of `_finish` looks at together
_AWAIT_LANES = 128
CAPACITY = 2048  # scores that it searches in registers
SCAN_PROGRAMS = 2048  # beyond these a program of `_scan` takes several chunks
MAX_CHUNKS_PER_PROGRAM = 8
_CHUNK, _SUB, _TILE = tl.constexpr(CHUNK), tl.constexpr(SUB_BLOCK), tl.constexpr(TILE)
MASK_BITS = tl.constexpr(32)  # of a word
POSITION_FIELD, MASK_PLACE_FIELD = tl.constexpr(POSITION), tl.constexpr(MASK_PLACE)
BLOCK_SEARCH_STOP = tl.constexpr(1 << 13)  # last bits of a bound need no search
NEVER = tl.constexpr(float("-inf"))
NUM_PIVOTS = tl.constexpr(4)
LINEAR_PASSES = tl.constexpr(8)  # only the first passes may cut the scores evenly
LINEAR_RANGE = tl.constexpr(128.0)  # wider ranges of scores are cut by their keys
LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SampleRows:
    """Sampling parameters of rows, in one tensor so that one copy uploads them.

    Attributes:
        packed: [ROW_FIELDS, >= R] int32, last dim contiguous; `pack_rows` makes its content.
    """

    packed: torch.Tensor


@dataclass(frozen=True)
class MaskPlaces:
    """Token masks at P places, each of one row of one step at a time. Page-locked host memory.

    Before the step is launched the host clears a place's flags; then or later it writes the words
    and sets `ready`, in this order.

    Attributes:
        words: [P, ceil(vocab / 32)] int32, contiguous: bit `token % 32` of word `token // 32` is 1
            where the token is allowed.
        ready: [P] int32, 1 once the words are complete.
        gave_up: [P] int32, written by the kernel: 1 if a row did not get its mask in time. Its
            token is invalid then: the mask may have been left out. The host may read it once an
            event recorded behind the step has happened.
        most_looks: how often a step looks at the flags of its rows before it gives up.
    """

    words: torch.Tensor
    ready: torch.Tensor
    gave_up: torch.Tensor
    most_looks: int = MOST_LOOKS


def make_mask_places(
    count: int, vocab_size: int, *, pin: bool, most_looks: int = MOST_LOOKS
) -> MaskPlaces:
    """Memory for `count` masks, all flags 0. `pin`: page-locked, which a GPU needs."""

    def make(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=pin)

    return MaskPlaces(
        make(count, -(-vocab_size // 32)), make(count), make(count), most_looks=most_looks
    )


@dataclass(frozen=True)
class SampleWorkspace:
    """Scratch memory of `sample_tokens` for `max_rows` rows; one call at a time may use it."""

    vocab_size: int
    best: torch.Tensor  # [max_rows, chunks] float32
    best_ids: torch.Tensor  # [max_rows, chunks] int32
    masses: torch.Tensor  # [max_rows, chunks] float32, sum of exp(score - best)
    block_maxima: torch.Tensor  # [max_rows, blocks] float32
    blocks: torch.Tensor  # [max_rows, blocks] int32, blocks that the support may touch
    scores: torch.Tensor  # [max_rows, capacity] float32
    mask_places: torch.Tensor  # [max_rows] int32, 1 + the place of a mask that is there, else 0
    no_slots: torch.Tensor  # [max_rows] int32, all -1: one kernel serves callers with and without


def make_sample_workspace(
    max_rows: int, vocab_size: int, device: torch.device, *, capacity: int = CAPACITY
) -> SampleWorkspace:
    """Scratch memory on `device`. `capacity`: a power of two, which tests make small."""
    assert capacity & (capacity - 1) == 0
    chunks = triton.cdiv(vocab_size, CHUNK)
    blocks = chunks * (CHUNK // SUB_BLOCK)

    def make(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(max_rows, columns, dtype=dtype, device=device)

    return SampleWorkspace(
        vocab_size,
        make(chunks, torch.float32),
        make(chunks, torch.int32),
        make(chunks, torch.float32),
        make(blocks, torch.float32),
        make(blocks, torch.int32),
        make(capacity, torch.float32),
        torch.zeros(max_rows, dtype=torch.int32, device=device),
        torch.full((max_rows,), -1, dtype=torch.int32, device=device),
    )


def pack_rows(
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    *,
    min_p: np.ndarray,
    seeds: np.ndarray,
    sample_indices: np.ndarray,
    positions: np.ndarray,
    mask_places: np.ndarray | None = None,
) -> np.ndarray:
    """Content of `SampleRows.packed`: [ROW_FIELDS, R] int32.

    Args:
        temperature: [R], 0 for a greedy row.
        top_k: [R], at least 1; vocabulary size where off.
        top_p: [R], 1 or more where off.
        min_p: [R], 0 where off.
        seeds: [R] int64, the bits of the unsigned seeds.
        sample_indices: [R], index among the request's `n`.
        positions: [R], absolute position of the token to be sampled; negative for a padding row.
        mask_places: [R], place of each row's mask in `MaskPlaces`, -1 for none; None: no row has
            one.
    """
    packed = np.empty((ROW_FIELDS, len(temperature)), np.int32)
    packed[0] = np.asarray(temperature, np.float32).view(np.int32)
    packed[1] = top_k
    packed[2] = np.asarray(top_p, np.float32).view(np.int32)
    packed[3] = np.asarray(min_p, np.float32).view(np.int32)
    packed[4:6] = np.ascontiguousarray(seeds, np.int64).view(np.int32).reshape(-1, 2).T
    packed[6] = sample_indices
    packed[7] = positions
    packed[8] = 0 if mask_places is None else np.asarray(mask_places) + 1
    return packed


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 of uint32 counters and keys (see sampling/noise.py): four uint32 words."""
    for _ in tl.static_range(10):
        first = c0.to(tl.uint64) * 0xD2511F53  # one wide product gives both words
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = second.to(tl.uint32)
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = first.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def noise_words(lanes, key_low, key_high, sample_index, position):
    """Random words of tokens 4 * lane to 4 * lane + 3: [L] int32 lanes to [4 * L] uint32."""
    zero = tl.zeros_like(lanes).to(tl.uint32)
    w0, w1, w2, w3 = philox(
        lanes.to(tl.uint32),
        zero + position.to(tl.uint32),
        zero + sample_index.to(tl.uint32),
        zero,
        key_low.to(tl.uint32),
        key_high.to(tl.uint32),
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # last axis is the word's low bit
    return tl.reshape(words, [4 * lanes.shape[0]])


@triton.jit
def gumbel(words):
    """-log(-log1p(-v)) with v = (word + 0.5) / 2**32 in float32, as sampling/noise.py has it."""
    v = tl.minimum((words.to(tl.float32) + 0.5) * (2.0**-32), LARGEST_BELOW_ONE)
    # Kahan's log1p: exact to a few ulp where log is, and v itself where 1 - v rounds to 1. Large
    # noise comes from small v, where a plain log(1 - v) has no digit left.
    rest = 1.0 - v
    taken = 1.0 - rest
    ratio = tl.log(rest) / tl.where(taken == 0.0, 1.0, taken)
    return -tl.log(tl.where(taken == 0.0, v, -v * ratio))


@triton.jit
def load_scores(logits, offsets, valid, temperature):
    """logits / temperature as float32, rounded as torch does; NaN and what is not valid is -inf."""
    values = tl.load(logits + offsets, mask=valid, other=NEVER).to(tl.float32)
    values = tl.where(values == values, values, NEVER)
    return tl.div_rn(values, tl.zeros_like(values) + temperature)


@triton.jit
def key_of(scores):
    """int32 keys in the order of the floats; both zeros have one key."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """The float of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bisect(keys, weights, low, high, above, target, STOP: tl.constexpr):
    """Narrows the bounds of a search over keys in registers until high - low <= STOP.

    `above` is the weight of keys beyond `high`, kept elsewhere if they are not among `keys`; keys
    beyond the first `high` must then have weight 0. Returns low, high, above.
    """
    first_above = above
    while high - low > STOP:
        middle = (low + high) >> 1
        weight = first_above + tl.sum(tl.where(keys > middle.to(tl.int32), weights, 0.0))
        below = weight < target
        above = tl.where(below, weight, above)
        high = tl.where(below, middle, high)
        low = tl.where(below, low, middle)
    return low, high, above


@triton.jit
def load_listed(listed, start):
    """Token ids [TILE] of listed blocks from `start` on, which of them exist, and their scores.

    Args:
        listed: logits of a row, its listed blocks, their number, the vocabulary, the temperature.
    """
    logits, blocks, num_blocks, vocab, temperature = listed
    lane = tl.arange(0, _TILE)
    entry = start + lane // _SUB
    block = tl.load(blocks + entry, mask=entry < num_blocks, other=0)
    tokens = block * _SUB + lane % _SUB
    valid = (entry < num_blocks) & (tokens < vocab)
    return tokens, valid, load_scores(logits, tokens, valid, temperature)


@triton.jit
def listed_lanes(blocks, num_blocks, start):
    """token id // 4 of the same tokens: [TILE // 4]."""
    lane = tl.arange(0, _TILE // 4)
    entry = start + lane // (_SUB // 4)
    block = tl.load(blocks + entry, mask=entry < num_blocks, other=0)
    return block * (_SUB // 4) + lane % (_SUB // 4)


@triton.jit
def gather(listed, low, high, scores, CAPACITY: tl.constexpr):
    """Writes the listed scores with low < key <= high to `scores`; stops beyond CAPACITY of them.

    Returns their number, or some number above CAPACITY if there are more than that.
    """
    _, _, num_blocks, _, _ = listed
    tl.debug_barrier()  # readers of the last use are done
    count = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while (start < num_blocks) & (count <= CAPACITY):
        tokens, valid, values = load_listed(listed, start)
        keys = key_of(values)
        wanted = valid & (keys > low.to(tl.int32)) & (keys <= high.to(tl.int32))
        place = count + tl.cumsum(wanted.to(tl.int32)) - 1
        tl.store(scores + place, values, mask=wanted & (place < CAPACITY))
        count += tl.sum(wanted.to(tl.int32))
        start += _TILE // _SUB
    tl.debug_barrier()
    return count


@triton.jit
def weigh(listed, highest, pivots):
    """Number and weight exp(score - highest) of listed tokens beyond each of the pivot keys [P]."""
    _, _, num_blocks, _, _ = listed
    counts = tl.zeros([NUM_PIVOTS, _TILE], tl.int32)
    masses = tl.zeros([NUM_PIVOTS, _TILE], tl.float32)
    for start in range(0, num_blocks, _TILE // _SUB):
        tokens, valid, values = load_listed(listed, start)
        beyond = valid[None, :] & (key_of(values)[None, :] > pivots[:, None])
        counts += beyond.to(tl.int32)
        masses += tl.where(beyond, tl.exp(values - highest)[None, :], 0.0)
    return tl.sum(counts, axis=1), tl.sum(masses, axis=1)


@triton.jit
def choose_pivots(low, high, number):
    """Keys that cut (low, high] for pass `number`: int32 [P], not below low, below high.

    Even cuts of the scores suit logits; even cuts of the keys always end, whatever the scores.
    """
    part = tl.arange(0, NUM_PIVOTS) + 1
    cuts = (low + (high - low) * part // (NUM_PIVOTS + 1)).to(tl.int32)
    bottom = score_of((low + 1).to(tl.int32))
    width = score_of(high.to(tl.int32)) - bottom
    if (number < LINEAR_PASSES) & (width < LINEAR_RANGE):
        step = width / (NUM_PIVOTS + 1)
        cuts = key_of(bottom + step * part.to(tl.float32))
        cuts = tl.minimum(tl.maximum(cuts, low.to(tl.int32)), (high - 1).to(tl.int32))
    return cuts


@triton.jit
def narrow(listed, highest, low, high, target, by_mass, CAPACITY: tl.constexpr):
    """Narrows (low, high] over all listed tokens until at most CAPACITY of them are inside.

    A pass over the tokens tries NUM_PIVOTS keys. Tokens beyond the first `high` must not exist.
    Returns low, high and the weight (count, or mass if `by_mass`) beyond high.
    """
    _, _, num_blocks, _, _ = listed
    number = tl.zeros([], tl.int32)
    most = num_blocks * _SUB  # tokens beyond low, at most
    fewest = tl.zeros([], tl.int32)  # tokens beyond high
    above = tl.zeros([], tl.float32)
    while (most - fewest > CAPACITY) & (high - low > 1):
        pivots = choose_pivots(low, high, number)
        counts, masses = weigh(listed, highest, pivots)
        weights = tl.where(by_mass, masses, counts.to(tl.float32))
        below = weights < target
        wide = pivots.to(tl.int64)
        high = tl.minimum(high, tl.min(tl.where(below, wide, high)))
        low = tl.maximum(low, tl.max(tl.where(below, low, wide)))
        above = tl.maximum(above, tl.max(tl.where(below, weights, 0.0)))
        fewest = tl.maximum(fewest, tl.max(tl.where(below, counts, 0)))
        most = tl.minimum(most, tl.min(tl.where(below, most, counts)))
        number += 1
    return low, high, above


@triton.jit
def sample_listed(listed, threshold, allowed_ties, noise):
    """argmax of score + noise over listed tokens beyond `threshold` and its first ties by id."""
    _, blocks, num_blocks, vocab, _ = listed
    best = tl.full([], NEVER, tl.float32)
    best_id = tl.zeros([], tl.int32)
    ties_before = tl.zeros([], tl.int32)
    for start in range(0, num_blocks, _TILE // _SUB):
        tokens, valid, values = load_listed(listed, start)
        keys = key_of(values)
        ties = (valid & (keys == threshold)).to(tl.int32)
        rank = ties_before + tl.cumsum(ties)
        inside = valid & ((keys > threshold) | ((ties != 0) & (rank <= allowed_ties)))
        ties_before += tl.sum(ties)
        lanes = listed_lanes(blocks, num_blocks, start)
        noisy = tl.where(inside, values + gumbel(noise_words(lanes, *noise)), NEVER)
        top = tl.max(noisy)
        token = tl.min(tl.where(inside & (noisy == top), tokens, vocab))
        best_id = tl.where(top > best, token, best_id)  # an earlier tile has lower ids
        best = tl.maximum(best, top)
    return best_id


@triton.jit
def _load_row(rows, stride, row):
    """Temperature, top-k, top-p and min-p of a row, and what its noise depends on: key, sample
    index and position."""
    rows += row
    limits = (
        tl.load(rows).to(tl.float32, bitcast=True),
        tl.load(rows + stride),
        tl.load(rows + 2 * stride).to(tl.float32, bitcast=True),
        tl.load(rows + 3 * stride).to(tl.float32, bitcast=True),
    )
    noise = (
        tl.load(rows + 4 * stride),
        tl.load(rows + 5 * stride),
        tl.load(rows + 6 * stride),
        tl.load(rows + 7 * stride),
    )
    return limits, noise


@triton.jit
def _is_restricted(limits, vocab):
    temperature, top_k, top_p, min_p = limits
    return (temperature > 0.0) & ((top_k < vocab) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def _load_flags(flags, places, wanted):
    """Flags of the wanted places as the host has them now; 1 for the others."""
    return tl.load(flags + places, mask=wanted, other=1, volatile=True)


@triton.jit(do_not_specialize=["rows_stride", "num_rows", "most_looks"])
def _await_masks(
    found,
    rows,
    ready,
    gave_up,
    rows_stride,
    num_rows,
    most_looks,
    LANES: tl.constexpr,
    FENCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Waits until the host has written the masks of all rows. `found`: 1 + the place of a row's
    mask; 0 without one, or where this program gave up, which it notes in `gave_up`."""
    wait_and_release(PDL)
    looks = tl.zeros([], tl.int32)
    for first in range(0, num_rows, LANES):
        row = first + tl.arange(0, LANES)
        inside = row < num_rows
        position = tl.load(rows + POSITION_FIELD * rows_stride + row, mask=inside, other=-1)
        place = tl.load(rows + MASK_PLACE_FIELD * rows_stride + row, mask=inside, other=0) - 1
        wanted = (position >= 0) & (place >= 0)
        flags = _load_flags(ready, place, wanted)
        while (tl.min(flags) == 0) & (looks < most_looks):
            flags = _load_flags(ready, place, wanted)
            looks += 1
        tl.store(found + row, tl.where(wanted & (flags != 0), place + 1, 0), mask=inside)
        tl.store(gave_up + place, 1, mask=wanted & (flags == 0))
    see_what_came_before(FENCE)


@triton.jit
def _load_allowed(words, chunk, num_words):
    """[CHUNK] int32, 1 where a row's mask allows the chunk's token."""
    place = chunk * (_CHUNK // MASK_BITS) + tl.arange(0, _CHUNK // MASK_BITS)
    some = tl.load(words + place, mask=place < num_words, other=0)
    bits = (some[:, None] >> tl.arange(0, MASK_BITS)[None, :]) & 1
    return tl.reshape(bits, [_CHUNK])


# Rows and slots lie anywhere in a step input buffer: one kernel serves all places.
@triton.jit(
    do_not_specialize=["rows_stride", "chunks_per_program"],
    do_not_specialize_on_alignment=["rows", "mask_words", "mask_places"],
)
def _scan(
    best,
    best_ids,
    masses,
    block_maxima,
    logits,
    rows,
    mask_words,
    mask_places,
    logits_stride,
    rows_stride,
    num_words,
    vocab,
    num_chunks,
    chunks_per_program,
    HAS_MASKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    wait_and_release(PDL)
    limits, noise = _load_row(rows, rows_stride, row)
    temperature, _, _, _ = limits
    _, _, _, position = noise
    restricted = _is_restricted(limits, vocab)
    if position >= 0:
        masked = position < 0
        if HAS_MASKS:
            place = tl.load(mask_places + row).to(tl.int64) - 1
            masked = place >= 0
            mask_words += place * num_words
        first = tl.program_id(0) * chunks_per_program
        for chunk in range(first, tl.minimum(first + chunks_per_program, num_chunks)):
            tokens = chunk * _CHUNK + tl.arange(0, _CHUNK)
            divisor = tl.where(temperature > 0.0, temperature, 1.0)
            scores = load_scores(logits + row * logits_stride, tokens, tokens < vocab, divisor)
            if HAS_MASKS and masked:
                allowed = _load_allowed(mask_words, chunk, num_words)
                scores = tl.where(allowed != 0, scores, NEVER)
                if restricted:  # then the scores of forbidden tokens are what their logits become
                    forbidden = (tokens < vocab) & (allowed == 0)
                    tl.store(logits + row * logits_stride + tokens, scores, mask=forbidden)
            if restricted:
                maxima = tl.max(tl.reshape(scores, [_CHUNK // _SUB, _SUB]), axis=1)
                block = chunk * (_CHUNK // _SUB) + tl.arange(0, _CHUNK // _SUB)
                tl.store(block_maxima + row * num_chunks * (_CHUNK // _SUB) + block, maxima)
                top = tl.max(maxima)
                finite = (top > NEVER) & (top < -NEVER)
                mass = tl.sum(tl.exp(scores - tl.where(finite, top, 0.0)))
                tl.store(masses + row * num_chunks + chunk, tl.where(finite, mass, 0.0))
            elif temperature > 0.0:
                lanes = chunk * (_CHUNK // 4) + tl.arange(0, _CHUNK // 4)
                scores += gumbel(noise_words(lanes, *noise))
            top = tl.max(scores)
            token = tl.min(tl.where(scores == top, tokens, vocab))
            tl.store(best + row * num_chunks + chunk, top)
            tl.store(best_ids + row * num_chunks + chunk, token)


@triton.jit
def _reachable(block_maxima, num_blocks, highest, mass, limits, vocab, BLOCKS: tl.constexpr):
    """A key such that what the thresholds depend on lies beyond it, int64; and the block keys.

    Top-k needs no token below the k-th largest block maximum: k tokens are at least as large.
    Top-p alone needs none below the maxima that hold top_p of the mass by themselves, and none so
    faint that all of the vocabulary at that score would not make up 1 - top_p. Min-p, and top-k
    with top-p, need all of their own set, for its mass.
    """
    _, top_k, top_p, min_p = limits
    block = tl.arange(0, BLOCKS)
    maxima = tl.load(block_maxima + block, mask=block < num_blocks, other=NEVER)
    keys = key_of(maxima)
    high = key_of(highest).to(tl.int64)
    low = key_of(highest + NEVER).to(tl.int64) - 1
    if min_p > 0.0:
        low = key_of(highest + tl.log(min_p)).to(tl.int64) - 1
    by_mass = top_k >= vocab
    if (top_k < vocab) | (min_p <= 0.0):
        weights = tl.where(by_mass, tl.exp(maxima - highest), 1.0)
        weights = tl.where(block < num_blocks, weights, 0.0)
        # The margin covers the rounding of sums: it only lets a few more tokens in.
        target = tl.where(by_mass, top_p * mass * 1.00001, top_k.to(tl.float32))
        low = bisect(keys, weights, low, high, tl.zeros([], tl.float32), target, BLOCK_SEARCH_STOP)[
            0
        ]
        if by_mass:
            faint = highest + tl.log((1.0 - top_p) * mass / (2.0 * vocab))
            low = tl.maximum(low, key_of(faint).to(tl.int64) - 1)
    return low, keys


@triton.jit
def _find_support(listed, scores, limits, highest, mass, low, CAPACITY: tl.constexpr):
    """The lowest key of the support, int32, and how many tokens with that key belong to it."""
    _, top_k, top_p, min_p = limits
    _, _, _, vocab, _ = listed
    high = key_of(highest).to(tl.int64)
    count = gather(listed, low, high, scores, CAPACITY)
    fits = count <= CAPACITY
    allowed_ties = tl.zeros([], tl.int32) + vocab
    place = tl.arange(0, CAPACITY)
    for phase in range(2):  # top-k, then top-p: one copy of the search in the code
        by_mass = phase == 1
        if tl.where(by_mass, top_p < 1.0, top_k < vocab):
            if by_mass & ((top_k < vocab) | (min_p > 0.0)):
                if fits:
                    values = tl.load(scores + place, mask=place < count, other=NEVER)
                    beyond = key_of(values) > low.to(tl.int32)
                    mass = tl.sum(tl.where(beyond, tl.exp(values - highest), 0.0))
                else:
                    pivots = tl.zeros_like(tl.arange(0, 4)) + low.to(tl.int32)
                    mass = tl.max(weigh(listed, highest, pivots)[1])
            target = tl.where(by_mass, top_p * mass, top_k.to(tl.float32))
            bottom = low
            top = high
            above = tl.zeros([], tl.float32)
            if not fits:
                bottom, top, above = narrow(listed, highest, low, high, target, by_mass, CAPACITY)
                count = gather(listed, bottom, top, scores, CAPACITY)
            values = tl.load(scores + place, mask=place < count, other=NEVER)
            weights = tl.where(by_mass, tl.exp(values - highest), 1.0)
            weights = tl.where(place < count, weights, 0.0)
            bottom, top, above = bisect(key_of(values), weights, bottom, top, above, target, 1)
            low = top - 1
            if by_mass:
                tie = tl.maximum(tl.exp(score_of(top.to(tl.int32)) - highest), 1e-37)
                ties = tl.minimum(tl.ceil((target - above) / tie), vocab.to(tl.float32))
                allowed_ties = tl.maximum(ties.to(tl.int32), 1)
    return (low + 1).to(tl.int32), allowed_ties


@triton.jit(
    do_not_specialize=["rows_stride"],
    do_not_specialize_on_alignment=["tokens", "last_tokens", "slots", "rows"],
)
def _finish(
    tokens,
    last_tokens,
    slots,
    best,
    best_ids,
    masses,
    block_maxima,
    blocks,
    scores,
    logits,
    rows,
    logits_stride,
    rows_stride,
    vocab,
    num_chunks,
    num_blocks,
    CHUNKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    limits, noise = _load_row(rows, rows_stride, row)  # the kernel before does not write them
    temperature, _, _, _ = limits
    _, _, _, position = noise
    wait_and_release(PDL)
    token = tl.zeros([], tl.int32)
    if position >= 0:
        chunk = tl.arange(0, CHUNKS)
        partial = row * num_chunks + chunk
        tops = tl.load(best + partial, mask=chunk < num_chunks, other=NEVER)
        ids = tl.load(best_ids + partial, mask=chunk < num_chunks, other=vocab)
        highest = tl.max(tops)
        token = tl.min(tl.where(tops == highest, ids, vocab))
        restricted = _is_restricted(limits, vocab)
        if restricted & (highest > NEVER) & (highest < -NEVER):
            mass = tl.load(masses + partial, mask=chunk < num_chunks, other=0.0)
            mass = tl.sum(mass * tl.exp(tops - highest))
            low, keys = _reachable(
                block_maxima + row * num_blocks, num_blocks, highest, mass, limits, vocab, BLOCKS
            )
            is_listed = (tl.arange(0, BLOCKS) < num_blocks) & (keys > low.to(tl.int32))
            blocks += row * num_blocks
            place = tl.cumsum(is_listed.to(tl.int32)) - 1
            tl.store(blocks + place, tl.arange(0, BLOCKS), mask=is_listed)
            num_listed = tl.sum(is_listed.to(tl.int32))
            listed = (logits + row * logits_stride, blocks, num_listed, vocab, temperature)
            threshold, allowed_ties = _find_support(
                listed, scores + row * CAPACITY, limits, highest, mass, low, CAPACITY
            )
            token = sample_listed(listed, threshold, allowed_ties, noise)
    tl.store(tokens + row, token.to(tl.int64))
    slot = tl.load(slots + row)
    if slot >= 0:
        tl.store(last_tokens + slot, token.to(tl.int64))


def _check_arguments(
    logits: torch.Tensor,
    packed: torch.Tensor,
    workspace: SampleWorkspace,
    slots: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    masks: MaskPlaces | None,
) -> None:
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and logits.dtype in _FLOAT_DTYPES
    assert packed.dtype == torch.int32 and packed.shape[0] == ROW_FIELDS and packed.stride(1) == 1
    assert num_rows <= min(packed.shape[1], len(workspace.best)) and vocab == workspace.vocab_size
    assert (slots is None) == (last_tokens is None)
    if slots is not None and last_tokens is not None:
        assert slots.dtype in (torch.int32, torch.int64) and last_tokens.dtype == torch.int64
        assert len(slots) >= num_rows and slots.is_contiguous() and last_tokens.is_contiguous()
    if masks is not None:
        assert masks.words.shape == (len(masks.ready), -(-vocab // 32))
        assert masks.gave_up.shape == masks.ready.shape
        for part in (masks.words, masks.ready, masks.gave_up):
            assert part.dtype == torch.int32 and part.is_contiguous()
        assert 0 <= masks.most_looks < 2**31 - 1


# large: three launches, and the contract of their arguments.
def sample_tokens(
    logits: torch.Tensor,
    rows: SampleRows,
    workspace: SampleWorkspace,
    *,
    slots: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
    masks: MaskPlaces | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Samples a token for each row of logits.

    A greedy row takes its argmax. Another takes the argmax of logit / temperature + noise
    (sampling/noise.py) within the support of `processors.restrict_support`. Equal scores: the
    lowest id. A row with a mask does so with -inf as the logits of forbidden tokens. NaN counts as
    -inf; a row without a finite maximum gives the first id of its maximum.
    Against the reference the border of top-p may move by the rounding of a float32 sum (about
    1e-6 of the mass), that of min-p by one ulp of a logarithm, and noise by a few ulp.

    Args:
        logits: [R, vocab] float32, bfloat16 or float16, last dim contiguous. In a row with a mask
            and top-k, top-p or min-p, those of forbidden tokens are overwritten.
        rows: parameters of at least R rows.
        workspace: for this vocabulary and at least R rows.
        slots: [>= R] int32 or int64; where not negative, the row's token also goes to
            `last_tokens[slot]`. A slot that two rows name gets the token of one of them.
        last_tokens: [slots] int64, given together with `slots`.
        masks: where the rows' masks are or will be; None: no row has one, whatever `rows` says.
        out: [R] int64, contiguous.

    Returns:
        `out`: [R] int64; 0 for padding rows.
    """
    num_rows, vocab = logits.shape
    packed = rows.packed
    num_chunks = workspace.best.shape[1]
    _check_arguments(logits, packed, workspace, slots, last_tokens, masks)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    assert out.shape == (num_rows,) and out.dtype == torch.int64 and out.is_contiguous()
    if num_rows == 0:
        return out
    wanted = triton.cdiv(num_rows * num_chunks, SCAN_PROGRAMS)
    per_program = min(wanted, MAX_CHUNKS_PER_PROGRAM)
    options = pdl_options(logits.device)
    partial = (workspace.best, workspace.best_ids, workspace.masses, workspace.block_maxima)
    if masks is not None:
        _await_masks[(1,)](
            workspace.mask_places,
            packed,
            masks.ready,
            masks.gave_up,
            packed.stride(0),
            num_rows,
            masks.most_looks,
            LANES=_AWAIT_LANES,
            FENCE=not INTERPRETED,
            num_warps=1,
            **options,
        )
    _scan[(triton.cdiv(num_chunks, per_program), num_rows)](
        *partial,
        logits,
        packed,
        packed if masks is None else masks.words,
        workspace.mask_places,
        logits.stride(0),
        packed.stride(0),
        -(-vocab // 32),
        vocab,
        num_chunks,
        per_program,
        HAS_MASKS=masks is not None,
        num_warps=4,
        **options,
    )
    _finish[(num_rows,)](
        out,
        out if last_tokens is None else last_tokens,
        workspace.no_slots if slots is None else slots,
        *partial,
        workspace.blocks,
        workspace.scores,
        logits,
        packed,
        logits.stride(0),
        packed.stride(0),
        vocab,
        num_chunks,
        workspace.blocks.shape[1],
        CHUNKS=triton.next_power_of_2(num_chunks),
        BLOCKS=triton.next_power_of_2(workspace.blocks.shape[1]),
        CAPACITY=workspace.scores.shape[1],
        num_warps=16,
        **options,
    )
    return out


def sample_tokens_reference(
    logits: torch.Tensor,
    rows: SampleRows,
    *,
    slots: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
    masks: MaskPlaces | None = None,
) -> torch.Tensor:
    """`sample_tokens` in plain torch, by sorting. It changes no logits and gives up a mask that is
    not ready at once."""
    num_rows, vocab = logits.shape
    packed = rows.packed[:, :num_rows].contiguous()
    scores = logits.float().masked_fill(logits.isnan(), float("-inf"))
    if masks is not None:
        for row, place in enumerate((packed[MASK_PLACE] - 1).tolist()):
            if place >= 0 and packed[POSITION, row] >= 0:
                if masks.ready[place]:
                    allowed = unpack_mask(masks.words[place], vocab).to(scores.device)
                    scores[row].masked_fill_(~allowed, float("-inf"))
                else:
                    masks.gave_up[place] = 1
    temperature, top_p, min_p = (packed[field].view(torch.float32) for field in (0, 2, 3))
    top_k, sample_indices, positions = (packed[field].long() for field in (1, 6, 7))
    words = packed[4:6].long() & 0xFFFFFFFF
    seeds = words[0] | (words[1] << 32)
    scaled = scores / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    off = torch.where(top_p < 1, top_p, 2.0)  # no sum of probabilities is beyond 2
    scaled = restrict_support(scaled, top_k, off, min_p)
    noisy = scaled + gumbel_noise(seeds, positions.clamp(min=0), sample_indices, vocab)
    sampled = torch.where(temperature > 0, noisy.argmax(dim=-1), scores.argmax(dim=-1))
    tokens = torch.where(positions < 0, 0, sampled)
    if slots is not None and last_tokens is not None:
        wanted = slots[:num_rows].long()
        last_tokens[wanted[wanted >= 0]] = tokens[wanted >= 0]
    return tokens
