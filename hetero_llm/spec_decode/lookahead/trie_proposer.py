"""Drafts of TACO-LLM's Turbo cache: a tree of what followed a sequence's last tokens before.

Contexts of min_match_length .. turbo_match_length tokens are looked up, in the local trie and in
the global ones, and grow one tree best first: the node with the highest path probability comes
next, whichever context it is from. A count does not say how likely a token is: that is estimated
from the outcome of earlier drafts, by acceptance buckets (trie_buckets.py). After SuffixDecoding
(Oliaro et al., arXiv 2411.04975) and EAGLE-2's choice of nodes by path probability (arXiv
2406.16858).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hetero_llm.spec_decode.array_table import BORROWING, INLINED
from hetero_llm.spec_decode.lookahead.ngram_index import hash_tokens
from hetero_llm.spec_decode.lookahead.suffix_trie import (
    CHILD,
    FREQ,
    LAST,
    MAX_CELL,
    REF,
    SIZE,
    TOKEN,
    TrieArrays,
    find,
    holds_key,
)
from hetero_llm.spec_decode.lookahead.trie_buckets import (
    GLOBAL,
    LENGTHS,
    LOCAL,
    NUM_BUCKETS,
    NUM_LENGTHS,
    ONCE,
    SECOND,
    SHARES,
)
from hetero_llm.utils.jit import njit

_LONGEST = int(LENGTHS[-1])
_SURE = np.float32(0.5)
_MOST_ANCHORS = 2  # all six would bring half a percent more tokens in twice the time
_NUM_TRIES = 4  # local, young, old, static
_OWN, _BOTH = 1, 3  # which tries to look up, by bits; 2: the global ones
_NOWHERE = -1  # places: a node, or -2 - position in the trie's text

_TOKEN, _LAST, _BUCKET, _PLACES = 0, 1, 2, 3  # columns of `_Work.found`
_SUM, _RATE = 2, 3  # columns of `_Work.weights`
_PARENT, _NEXT, _CONTEXT, _RATED_BY, _WHERE = 0, 1, 2, 3, 4  # columns of `_Work.candidates`

# Of a plain type: each literal would compile the function it is passed to once more.
_ZERO: Any = np.int64(0)
_ROOT: Any = np.int64(-1)
_BY_SUM: Any = np.int64(_SUM)
_BY_RATE: Any = np.int64(_RATE)
_TRIES = np.arange(_NUM_TRIES)


class TrieProposalParams(NamedTuple):
    """Of exactly these types: another type in any field compiles every function once more.

    Attributes:
        key_length, match_length: tokens of the shortest and the longest context: min_match_length
            and turbo_match_length of lookahead_cache_config.json.
        copy_length: depth of the tree; sure_length: that of nodes that are more likely accepted
            than not.
        top_k_in_cell: continuations of a context that are considered: the most frequent, local and
            global frequencies added up; of equal ones the newest.
        token_paths_top_k: most children of a node. With 1 the global tries are looked up only where
            the local one has nothing.
        start_freq: of a new entry of the local trie.
        p_min: nodes less likely to be accepted are left out.
    """

    key_length: int
    match_length: int
    copy_length: int
    sure_length: int
    top_k_in_cell: int
    token_paths_top_k: int
    start_freq: float
    p_min: float


class _Tries(NamedTuple):
    """The tries of one sequence, each with the text that its positions refer to. `first`, `end`:
    where the sequence lies in `text`."""

    local: TrieArrays
    text: np.ndarray
    first: int
    end: int
    young: TrieArrays
    young_text: np.ndarray
    old: TrieArrays
    old_text: np.ndarray
    static: TrieArrays
    static_text: np.ndarray


class _Work(NamedTuple):
    """Memory of one call.

    Attributes:
        found: [F, 3 + 4] int32, what may follow a context: token, last position, acceptance bucket,
            and its place in each trie.
        weights: [F, 4] float32: times seen locally and globally, sum of frequencies, and the
            acceptance rate of the bucket.
        candidates: [C, 4 + 4] int32: parent, token, length of the context, bucket and places.
        probs: [C] float32 path probability of each candidate.
        heap: [C] int32 candidates, the best one first.
        depths: [nodes] int32 of the tree.
        places: [4] int32 of the context that is expanded, one in each trie.
        rates: [buckets] float32 acceptance rates, given that the parent is accepted.
    """

    found: np.ndarray
    weights: np.ndarray
    candidates: np.ndarray
    probs: np.ndarray
    heap: np.ndarray
    depths: np.ndarray
    places: np.ndarray
    rates: np.ndarray


@njit(**INLINED)
def _gather(
    arrays: TrieArrays,
    arena: np.ndarray,
    known: int,
    place: int,
    trie: int,
    start_freq: float,
    work: _Work,
    count: int,
) -> int:
    """Adds what one trie has at a place to the `count` continuations found so far; not for
    `_NOWHERE`."""
    first, size = np.int64(-2 - place), np.int64(0)
    if place >= 0:
        first, size = np.int64(arrays.nodes[place, REF]), np.int64(arrays.nodes[place, SIZE])
    if size == 0 and (first >= known or arena[first] < 0):
        return count
    found, weights = work.found, work.weights
    before = count
    for row in range(first, first + (size if size > 0 else 1)):
        if size == 0:  # a position
            token, last, child, freq = arena[row], row, -1, start_freq
        else:  # an entry
            token, last = arrays.entries[row, TOKEN], arrays.entries[row, LAST]
            child, freq = arrays.entries[row, CHILD], float(arrays.freqs[row, FREQ])
        index = 0
        while index < before and found[index, _TOKEN] != token:
            index += 1
        if index == before:
            index = count
            count += 1
            found[index, _TOKEN] = token
            found[index, _LAST] = last
            found[index, _PLACES:] = _NOWHERE
            weights[index, : _SUM + 1] = 0.0
        # An entry starts at start_freq and gains 1 at a time; decay may take it below.
        times = freq - start_freq + 1.0 if freq >= start_freq else freq / start_freq
        weights[index, min(trie, GLOBAL)] += times
        weights[index, _SUM] += freq
        # Where the trie ends, the tokens after the newest occurrence are read from the text.
        found[index, _PLACES + trie] = child if child >= 0 else -2 - (last + 1)
    return count


@njit(**BORROWING)
def _best(work: _Work, begin: int, count: int, column: int) -> int:
    """Of the continuations begin .. count-1 the one with most weight in this column; of equal ones
    the most frequent, then the newest, as far as positions in different texts can tell."""
    found, weights = work.found, work.weights
    best = begin
    for index in range(begin + 1, count):
        if weights[index, column] != weights[best, column]:
            better = weights[index, column] > weights[best, column]
        elif weights[index, _SUM] != weights[best, _SUM]:
            better = weights[index, _SUM] > weights[best, _SUM]
        else:
            better = found[index, _LAST] > found[best, _LAST]
        if better:
            best = index
    return best


@njit(**BORROWING)
def _swap(work: _Work, one: int, other: int) -> None:
    """Two continuations change places."""
    if one == other:
        return
    for column in range(_PLACES + _NUM_TRIES):
        number = work.found[one, column]
        work.found[one, column] = work.found[other, column]
        work.found[other, column] = number
    for column in range(_RATE + 1):
        weight = work.weights[one, column]
        work.weights[one, column] = work.weights[other, column]
        work.weights[other, column] = weight


@njit(**BORROWING)
def _estimate(work: _Work, count: int, context: int) -> None:
    """Fills in bucket and rate of all that may follow a context of `context` tokens: those of the
    source, local or global, that makes it likelier."""
    found, weights = work.found, work.weights
    length = 0
    while length + 1 < NUM_LENGTHS and LENGTHS[length + 1] <= context:
        length += 1
    for index in range(count):
        weights[index, _RATE] = -1.0
    for source in (LOCAL, GLOBAL):
        total = 0.0
        for index in range(count):
            total += weights[index, source]
        for index in range(count):
            times = weights[index, source]
            if times == 0.0:
                continue
            share = 0
            if times == total and total <= 1.0:
                share = ONCE
            else:
                while share < len(SHARES) and SHARES[share] * total <= times:
                    share += 1
            bucket = (source * NUM_LENGTHS + length) * NUM_BUCKETS + share
            if work.rates[bucket] > weights[index, _RATE]:
                weights[index, _RATE] = work.rates[bucket]
                found[index, _BUCKET] = bucket


@njit(**BORROWING)
def _is_better(work: _Work, one: np.int32, other: np.int32) -> bool:
    """Whether a candidate has a higher path probability, or the same and is older."""
    if work.probs[one] != work.probs[other]:
        return bool(work.probs[one] > work.probs[other])
    return bool(one < other)


@njit(**BORROWING)
def _push(work: _Work, size: int, candidate: np.int32) -> None:
    """Adds a candidate to the heap of `size`."""
    heap = work.heap
    place = size
    while place > 0 and _is_better(work, candidate, heap[(place - 1) >> 1]):
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    heap[place] = candidate


@njit(**BORROWING)
def _pop(work: _Work, size: int) -> np.int32:
    """Takes the best candidate off the heap of `size`."""
    heap = work.heap
    best, last = heap[0], heap[size - 1]
    place, below = 0, 1
    while below < size - 1:
        if below + 1 < size - 1 and _is_better(work, heap[below + 1], heap[below]):
            below += 1
        if _is_better(work, last, heap[below]):
            break
        heap[place] = heap[below]
        place, below = below, 2 * below + 1
    heap[place] = last
    return best


@njit(**INLINED)
def _expand(
    tries: _Tries,
    params: TrieProposalParams,
    work: _Work,
    context: int,
    parent: int,
    parent_prob: np.float32,
    held: int,
    size: int,
) -> tuple[int, int]:
    """Makes candidates of what follows a context of `context` tokens, found at `work.places`.

    No context can contribute more children than a node may have, so no more become candidates.

    Args:
        parent, parent_prob: the node that they would be children of, and its path probability.
        held, size: candidates so far, and those in the heap.

    Returns:
        Both numbers afterwards.
    """
    start, places, count = params.start_freq, work.places, _ZERO
    if places[0] != _NOWHERE:
        count = _gather(
            tries.local, tries.text, tries.end, places[0], _TRIES[0], start, work, count
        )
    if places[1] != _NOWHERE:
        text = tries.young_text
        count = _gather(tries.young, text, len(text), places[1], _TRIES[1], 1.0, work, count)
    if places[2] != _NOWHERE:
        text = tries.old_text
        count = _gather(tries.old, text, len(text), places[2], _TRIES[2], 1.0, work, count)
    if places[3] != _NOWHERE:
        text = tries.static_text
        count = _gather(tries.static, text, len(text), places[3], _TRIES[3], 1.0, work, count)
    if count == 0:
        return held, size
    _estimate(work, count, context)
    if count > params.top_k_in_cell:
        for index in range(params.top_k_in_cell):
            _swap(work, index, _best(work, index, count, _BY_SUM))
        count = params.top_k_in_cell
    for index in range(min(count, params.token_paths_top_k)):
        best = _best(work, index, count, _BY_RATE)
        path_prob = work.weights[best, _RATE] * parent_prob
        if path_prob < params.p_min:
            break
        work.probs[held] = path_prob
        work.candidates[held, _PARENT] = parent
        work.candidates[held, _NEXT] = work.found[best, _TOKEN]
        work.candidates[held, _CONTEXT] = context
        work.candidates[held, _RATED_BY] = work.found[best, _BUCKET]
        for trie in range(_NUM_TRIES):
            work.candidates[held, _WHERE + trie] = work.found[best, _PLACES + trie]
        _push(work, size, np.int32(held))
        held += 1
        size += 1
        _swap(work, index, best)
    return held, size


@njit(**INLINED)
def _anchor(
    arrays: TrieArrays,
    arena: np.ndarray,
    key_length: int,
    text: np.ndarray,
    salt: int,
    end: int,
    length: int,
) -> int:
    """The place of the context of the `length` tokens before `end` in a trie."""
    node, beyond = find(arrays, key_length, arena, text, salt, end, length)
    if node < 0 or beyond == 0:
        return node
    return -2 - (np.int64(arrays.nodes[node, REF]) + beyond)


@njit(**INLINED)
def _start(
    tries: _Tries,
    params: TrieProposalParams,
    work: _Work,
    asked: int,
    first: int,
    salt: int,
    namespace: int,
) -> int:
    """Looks up the contexts at the end of the sequence, longest first, until two of them have given
    candidates. Returns the number of candidates."""
    text, end, shortest, places = tries.text, tries.end, params.key_length, work.places
    run = 0
    while run < min(params.match_length, end - first) and text[end - 1 - run] >= 0:
        run += 1
    held = size = anchors = _ZERO
    if run < shortest:
        return held
    # A global trie that does not know the last tokens knows no longer context that ends in them;
    # the local one may, by tokens that are yet to be entered.
    key = hash_tokens(text, end - shortest, end, namespace)
    has_young = asked != _OWN and holds_key(tries.young, key)
    has_old = asked != _OWN and holds_key(tries.old, key)
    has_static = asked != _OWN and holds_key(tries.static, key)
    for length in range(run, shortest - 1, -1):
        places[:] = _NOWHERE
        if has_young:
            one, arena = tries.young, tries.young_text
            places[1] = _anchor(one, arena, shortest, text, namespace, end, length)
        if has_old:
            one, arena = tries.old, tries.old_text
            places[2] = _anchor(one, arena, shortest, text, namespace, end, length)
        if has_static:
            one, arena = tries.static, tries.static_text
            places[3] = _anchor(one, arena, shortest, text, namespace, end, length)
        if asked & _OWN:
            places[0] = _anchor(tries.local, text, shortest, text, salt, end, length)
        context = length
        if length == params.match_length:
            context = _true_length(tries, places[0], first, length)
        before = held
        held, size = _expand(tries, params, work, context, _ROOT, np.float32(1.0), held, size)
        anchors += held > before
        if anchors == _MOST_ANCHORS:
            break
    return held


@njit(**INLINED)
def _true_length(tries: _Tries, place: int, first: int, length: int) -> int:
    """How many of the tokens before the newest occurrence of a context in the sequence itself are
    those at its end; `length` of them are known to be. Counts up to `_LONGEST`: beyond, estimates
    are the same."""
    nodes, entries = tries.local.nodes, tries.local.entries
    if place == _NOWHERE:
        return length
    newest = np.int64(-2 - place)
    if place >= 0:
        block, size = nodes[place, REF], nodes[place, SIZE]
        newest = np.int64(block)
        if size > 0:
            newest = np.int64(0)
            for row in range(block, block + size):
                newest = max(newest, np.int64(entries[row, LAST]))
    text, end = tries.text, tries.end
    while (
        length < _LONGEST
        and newest - 1 - length >= first
        and text[newest - 1 - length] == text[end - 1 - length]
        and text[end - 1 - length] >= 0
    ):
        length += 1
    return length


@njit(**BORROWING)
def _go_round(tries: _Tries, place: int, depth: int) -> int:
    """The place after a path of `depth` tokens. One at the end of the sequence becomes the place
    where the path began: a copy that reaches the end has gone round a loop, which it repeats. A
    path that is longer than the sequence has gone round several times, and ends."""
    nodes = tries.local.nodes
    if place >= 0 and nodes[place, SIZE] == 0 and nodes[place, REF] == tries.end:
        place = -2 - tries.end
    if place != -2 - tries.end:
        return place
    return place + depth if tries.end - depth >= tries.first else _NOWHERE


@njit(**INLINED)
def _grow(
    tries: _Tries,
    params: TrieProposalParams,
    work: _Work,
    held: int,
    limit: int,
    tokens: np.ndarray,
    parents: np.ndarray,
    path_probs: np.ndarray,
    buckets: np.ndarray,
) -> int:
    """Turns the `held` candidates and what follows them into nodes, the likeliest first.

    Candidates leave the heap with falling path probabilities, so one whose node is there already
    cannot make it likelier. Continuations that a shorter context knows below such a node are left
    out: they would bring one accepted token more in three hundred, and take several times as long.

    Returns:
        The number of nodes.
    """
    candidates, probs, depths = work.candidates, work.probs, work.depths
    size, count = held, 0
    while size > 0 and count < limit:
        best = _pop(work, size)
        size -= 1
        parent, token = np.int64(candidates[best, _PARENT]), candidates[best, _NEXT]
        above = np.float32(1.0) if parent < 0 else path_probs[parent]
        node, siblings, left = parent + 1, 0, above
        while node < count and (parents[node] != parent or tokens[node] != token):
            if parents[node] == parent:
                siblings += 1
                left -= path_probs[node]
            node += 1
        if node < count or siblings == params.token_paths_top_k:
            continue
        bucket = candidates[best, _RATED_BY]
        if siblings > 0:
            # It can be right only where its better siblings are wrong.
            bucket += SECOND
            lower = min(above * work.rates[bucket], left)
            if lower < probs[best]:
                probs[best] = lower
                if lower >= params.p_min:
                    _push(work, size, best)
                    size += 1
                continue
        tokens[count], parents[count] = token, parent
        path_probs[count], buckets[count] = probs[best], bucket
        depth = 1 if parent < 0 else depths[parent] + 1
        depths[count] = depth
        count += 1
        if depth < (params.sure_length if path_probs[node] > _SURE else params.copy_length):
            for trie in range(_NUM_TRIES):
                work.places[trie] = candidates[best, _WHERE + trie]
            work.places[0] = _go_round(tries, work.places[0], depth)
            context = np.int64(candidates[best, _CONTEXT]) + 1
            held, size = _expand(tries, params, work, context, node, path_probs[node], held, size)
    return count


@njit(cache=True, nogil=True)
def new_work(params: TrieProposalParams, table: np.ndarray, width: int) -> _Work:
    """Memory for trees of at most `width` nodes.

    Args:
        table: [buckets, 2] float32, accepted and tried nodes of each acceptance bucket.
    """
    # A node is expanded at most once for each length of the context that leads to it.
    lengths = params.match_length - params.key_length + 1
    room = lengths * (width + 1) * min(params.token_paths_top_k, params.top_k_in_cell)
    return _Work(
        found=np.empty((_NUM_TRIES * MAX_CELL, _PLACES + _NUM_TRIES), np.int32),
        weights=np.empty((_NUM_TRIES * MAX_CELL, _RATE + 1), np.float32),
        candidates=np.empty((room, _WHERE + _NUM_TRIES), np.int32),
        probs=np.empty(room, np.float32),
        heap=np.empty(room, np.int32),
        depths=np.empty(width, np.int32),
        places=np.empty(_NUM_TRIES, np.int32),
        rates=(table[:, 0] + np.float32(1.0)) / (table[:, 1] + np.float32(2.0)),
    )


@njit(**BORROWING)
def propose_all(
    local: TrieArrays,
    text: np.ndarray,
    salts: np.ndarray,
    firsts: np.ndarray,
    ends: np.ndarray,
    namespaces: np.ndarray,
    globals_: tuple[tuple[TrieArrays, np.ndarray], ...],
    params: TrieProposalParams,
    work: _Work,
    limits: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    path_probs: np.ndarray,
    buckets: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Drafts a tree of what followed the last tokens of each sequence before.

    A node is accepted after its parent at the rate of its acceptance bucket; of siblings all but
    the first at most as often as the better ones are wrong. A deeper node's context is longer by
    its path.

    Args:
        local, text: trie and int32 tokens of the running sequences.
        salts: [S] int64, of each one's own entries.
        firsts, ends: [S] int64, where each one lies in `text`, all of it inserted.
        namespaces: [S] int64, each one's salt in the global tries.
        globals_: three times (trie, its text: int32, cut after the last token that is known).
        work: of `new_work`, with the rates of the acceptance buckets.
        limits: [S] int32, most nodes of each draft.
        tokens, parents: [S, 63] int32, written.
        path_probs: [S, 63] float32, written: siblings together do not exceed their parent.
        buckets: [S, 63] int32, written: the acceptance bucket, out of 2 * NUM_LENGTHS *
            NUM_BUCKETS, that learns whether the node was accepted if its parent was.
        counts: [S] int32, written: nodes of each draft.
    """
    young, old, static = globals_
    own_first = params.token_paths_top_k == 1
    for i in range(len(ends)):
        tries = _Tries(local, text, firsts[i], ends[i], *young, *old, *static)
        limit = min(limits[i], tokens.shape[1])
        row = tokens[i], parents[i], path_probs[i], buckets[i]
        count = 0
        for asked in range(_OWN if own_first else _BOTH, _BOTH if own_first else _BOTH + 1):
            if count == 0 and limit > 0:
                held = _start(tries, params, work, asked, firsts[i], salts[i], namespaces[i])
                count = _grow(tries, params, work, held, limit, *row)
        counts[i] = count
