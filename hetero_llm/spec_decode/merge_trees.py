"""Merges two drafts of one sequence into one tree."""

from __future__ import annotations

import numpy as np

from hetero_llm.utils.jit import njit


@njit(cache=True, nogil=True)
def merge(
    tokens: np.ndarray,
    parents: np.ndarray,
    path_probs: np.ndarray,
    buckets: np.ndarray,
    counts: np.ndarray,
    more_tokens: np.ndarray,
    more_parents: np.ndarray,
    more_path_probs: np.ndarray,
    more_buckets: np.ndarray,
    more_counts: np.ndarray,
    limits: np.ndarray,
) -> None:
    """Adds the nodes of other drafts to drafts and sorts each by path probability, parents first.

    A node that is there already stays as it is. A new one keeps its path probability, lowered so
    that siblings together do not exceed their parent.

    Args:
        tokens, parents, path_probs, buckets, counts: as in `Proposals`; changed.
        more_tokens, more_parents, more_path_probs, more_buckets, more_counts: the other drafts.
        limits: [S] int32, most nodes of each draft; the least likely are left out.
    """
    width = tokens.shape[1]
    places = np.empty(width, np.int64)
    all_tokens, all_parents = np.empty(2 * width, np.int32), np.empty(2 * width, np.int32)
    all_path_probs, all_buckets = np.empty(2 * width, np.float32), np.empty(2 * width, np.int32)
    order, rank = np.empty(2 * width, np.int64), np.empty(2 * width, np.int64)
    for i in range(len(counts)):
        count = counts[i]
        all_tokens[:count] = tokens[i, :count]
        all_parents[:count] = parents[i, :count]
        all_path_probs[:count] = path_probs[i, :count]
        all_buckets[:count] = buckets[i, :count]
        for other in range(more_counts[i]):
            parent = more_parents[i, other]
            if parent >= 0:
                parent = places[parent]
            left = all_path_probs[parent] if parent >= 0 else np.float32(1.0)
            node = parent + 1
            token = more_tokens[i, other]
            while node < count and (all_parents[node] != parent or all_tokens[node] != token):
                if all_parents[node] == parent:
                    left -= all_path_probs[node]
                node += 1
            places[other] = node
            if node == count:
                all_tokens[node], all_parents[node] = token, parent
                all_path_probs[node] = max(min(more_path_probs[i, other], left), np.float32(0.0))
                all_buckets[node] = more_buckets[i, other]
                count += 1
        # A stable insertion sort: children are no likelier than their parents and come behind them.
        for node in range(count):
            place = node
            while place > 0 and all_path_probs[order[place - 1]] < all_path_probs[node]:
                order[place] = order[place - 1]
                place -= 1
            order[place] = node
        count = min(count, limits[i], width)
        for place in range(count):
            node = order[place]
            rank[node] = place
            parent = all_parents[node]
            tokens[i, place] = all_tokens[node]
            parents[i, place] = rank[parent] if parent >= 0 else -1
            path_probs[i, place] = all_path_probs[node]
            buckets[i, place] = all_buckets[node]
        counts[i] = count
