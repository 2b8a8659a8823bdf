"""Device functions of `pick`: counter-based noise, and the threshold search of top-k and top-p.

Scores are compared through int32 keys in the order of the floats. Top-k and top-p ask the same
question, for weights 1 and weights exp(score - highest): which is the smallest key v with
weight(keys > v) < target? Its answer is always the key of some token. The search bisects the bits
of v, so it sorts nothing. A row of the vocabulary is cut into blocks of SUB tokens whose maxima are
known; blocks whose maximum is out of reach are never looked at ("listed" blocks are the others,
in order of token id).

Bounds of a search: v is in (low, high], int64 so that low may be one below the smallest key.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(float("-inf"))
NUM_PIVOTS = tl.constexpr(4)
LINEAR_PASSES = tl.constexpr(8)  # only the first passes may cut the scores evenly
LINEAR_RANGE = tl.constexpr(128.0)  # wider ranges of scores are cut by their keys
LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


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
def listed_tokens(blocks, num_blocks, start, vocab, SUB: tl.constexpr, TILE: tl.constexpr):
    """Token ids [TILE] of listed blocks from `start` on, and which of them exist."""
    lane = tl.arange(0, TILE)
    entry = start + lane // SUB
    block = tl.load(blocks + entry, mask=entry < num_blocks, other=0)
    tokens = block * SUB + lane % SUB
    return tokens, (entry < num_blocks) & (tokens < vocab)


@triton.jit
def listed_lanes(blocks, num_blocks, start, SUB: tl.constexpr, TILE: tl.constexpr):
    """token id // 4 of the same tokens: [TILE // 4]."""
    lane = tl.arange(0, TILE // 4)
    entry = start + lane // (SUB // 4)
    block = tl.load(blocks + entry, mask=entry < num_blocks, other=0)
    return block * (SUB // 4) + lane % (SUB // 4)


@triton.jit
def gather(
    logits,
    blocks,
    num_blocks,
    vocab,
    temperature,
    low,
    high,
    scores,
    CAPACITY: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the listed scores with low < key <= high to `scores`; stops beyond CAPACITY of them.

    Returns their number, or some number above CAPACITY if there are more than that.
    """
    tl.debug_barrier()  # readers of the last use are done
    count = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while (start < num_blocks) & (count <= CAPACITY):
        tokens, valid = listed_tokens(blocks, num_blocks, start, vocab, SUB, TILE)
        values = load_scores(logits, tokens, valid, temperature)
        keys = key_of(values)
        wanted = valid & (keys > low.to(tl.int32)) & (keys <= high.to(tl.int32))
        place = count + tl.cumsum(wanted.to(tl.int32)) - 1
        tl.store(scores + place, values, mask=wanted & (place < CAPACITY))
        count += tl.sum(wanted.to(tl.int32))
        start += TILE // SUB
    tl.debug_barrier()
    return count


@triton.jit
def weigh(
    logits,
    blocks,
    num_blocks,
    vocab,
    temperature,
    highest,
    pivots,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Number and weight exp(score - highest) of listed tokens beyond each of the pivot keys [P]."""
    counts = tl.zeros([NUM_PIVOTS, TILE], tl.int32)
    masses = tl.zeros([NUM_PIVOTS, TILE], tl.float32)
    for start in range(0, num_blocks, TILE // SUB):
        tokens, valid = listed_tokens(blocks, num_blocks, start, vocab, SUB, TILE)
        values = load_scores(logits, tokens, valid, temperature)
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
def narrow(
    logits,
    blocks,
    num_blocks,
    vocab,
    temperature,
    highest,
    low,
    high,
    target,
    by_mass,
    CAPACITY: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Narrows (low, high] over all listed tokens until at most CAPACITY of them are inside.

    A pass over the tokens tries NUM_PIVOTS keys. Tokens beyond the first `high` must not exist.
    Returns low, high and the weight (count, or mass if `by_mass`) beyond high.
    """
    number = tl.zeros([], tl.int32)
    most = num_blocks * SUB  # tokens beyond low, at most
    fewest = tl.zeros([], tl.int32)  # tokens beyond high
    above = tl.zeros([], tl.float32)
    while (most - fewest > CAPACITY) & (high - low > 1):
        pivots = choose_pivots(low, high, number)
        counts, masses = weigh(
            logits, blocks, num_blocks, vocab, temperature, highest, pivots, SUB, TILE
        )
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
def draw_listed(
    logits,
    blocks,
    num_blocks,
    vocab,
    temperature,
    threshold,
    allowed_ties,
    key_low,
    key_high,
    sample_index,
    position,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
):
    """argmax of score + noise over listed tokens beyond `threshold` and its first ties by id."""
    best = tl.full([], NEVER, tl.float32)
    best_id = tl.zeros([], tl.int32)
    ties_before = tl.zeros([], tl.int32)
    for start in range(0, num_blocks, TILE // SUB):
        tokens, valid = listed_tokens(blocks, num_blocks, start, vocab, SUB, TILE)
        values = load_scores(logits, tokens, valid, temperature)
        keys = key_of(values)
        ties = (valid & (keys == threshold)).to(tl.int32)
        rank = ties_before + tl.cumsum(ties)
        inside = valid & ((keys > threshold) | ((ties != 0) & (rank <= allowed_ties)))
        ties_before += tl.sum(ties)
        lanes = listed_lanes(blocks, num_blocks, start, SUB, TILE)
        noise = gumbel(noise_words(lanes, key_low, key_high, sample_index, position))
        noisy = tl.where(inside, values + noise, NEVER)
        top = tl.max(noisy)
        token = tl.min(tl.where(inside & (noisy == top), tokens, vocab))
        best_id = tl.where(top > best, token, best_id)  # an earlier tile has lower ids
        best = tl.maximum(best, top)
    return best_id
