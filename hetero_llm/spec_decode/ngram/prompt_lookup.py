"""Prompt lookup, vLLM's speculative_model="[ngram]": a sequence drafts from itself, without index.

The idea is Saxena's "Prompt Lookup Decoding" (2023); as in vLLM, the longest n-gram wins. The
newest of its occurrences is taken, which is right a little more often than the oldest.
"""

from __future__ import annotations

import numpy as np

from hetero_llm.utils.jit import njit

_MAX_NODES = 63
_FIRST_RATES = np.array([0.0, 0.15, 0.45, 0.5, 0.6], np.float32)
_FURTHER_RATES = np.array([0.0, 0.5, 0.6, 0.7, 0.75], np.float32)
"""By tokens matched (at most 4): probability that the first drafted token is accepted, and each
further one if the one before was. Rough figures from source code."""


@njit(cache=True, nogil=True)
def _newest_match(
    text: np.ndarray, first: int, end: int, largest: int, borders: np.ndarray
) -> tuple[int, int]:
    """The longest n-gram, of at most `largest` tokens, that ends the text and occurs before.

    Knuth, Morris and Pratt's search, backwards: the pattern begins with the last token and goes
    back, so that whatever prefix of it matches is an n-gram that ends the text. It takes time
    linear in the text, and less if the whole pattern is found.

    Args:
        borders: [largest] int64, scratch.

    Returns:
        Its size, 0 if there is none, and the position after its newest occurrence.
    """
    length = 0
    while length < largest and length < end - first and text[end - 1 - length] >= 0:
        length += 1
    # borders[i]: the longest proper prefix of the pattern's first i + 1 tokens that ends them.
    matched = 0
    for index in range(length):
        if index == 0:
            borders[0] = 0
            continue
        token = text[end - 1 - index]
        while matched > 0 and text[end - 1 - matched] != token:
            matched = borders[matched - 1]
        if text[end - 1 - matched] == token:
            matched += 1
        borders[index] = matched
    best, after = 0, end
    matched = 0
    position = end - 2
    while position >= first and best < length:
        token = text[position]
        while matched > 0 and text[end - 1 - matched] != token:
            matched = borders[matched - 1]
        if text[end - 1 - matched] == token:
            matched += 1
        if matched > best:
            best, after = matched, position + matched
        position -= 1
    return best, after


@njit(cache=True, nogil=True)
def propose_ngrams(
    text: np.ndarray,
    firsts: np.ndarray,
    ends: np.ndarray,
    limits: np.ndarray,
    smallest: int,
    largest: int,
    num_tokens: int,
    tokens: np.ndarray,
    parents: np.ndarray,
    path_probs: np.ndarray,
    buckets: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Drafts, as a chain, what followed the longest n-gram that ends each sequence and recurs.

    Args:
        text: int32, with every sequence at firsts[i] .. ends[i] - 1; nothing matches or is drafted
            across a separator (-1).
        firsts, ends: [S] int64.
        limits: [S] int32, most nodes of each draft.
        smallest, largest: sizes of the n-grams, 1 <= smallest <= largest.
        num_tokens: most nodes of any draft.
        tokens, parents, buckets: [S, 63] int32, written.
        path_probs: [S, 63] float32, written: fixed estimates (see above), and so `buckets` is -1.
        counts: [S] int32, written: nodes of each draft.
    """
    assert 1 <= smallest <= largest
    borders = np.empty(largest, np.int64)
    for index in range(len(ends)):
        counts[index] = 0
        limit = min(limits[index], num_tokens, _MAX_NODES)
        if limit <= 0:
            continue
        end = ends[index]
        size, position = _newest_match(text, firsts[index], end, largest, borders)
        if size < smallest:
            continue
        level = min(size, len(_FIRST_RATES) - 1)
        path_prob = _FIRST_RATES[level]
        count = 0
        while count < limit and position < end and text[position] >= 0:
            tokens[index, count] = text[position]
            parents[index, count] = count - 1
            path_probs[index, count] = path_prob
            buckets[index, count] = -1
            path_prob *= _FURTHER_RATES[level]
            position += 1
            count += 1
        counts[index] = count
