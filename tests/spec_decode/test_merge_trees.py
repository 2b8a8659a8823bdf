"""Two drafts become one tree: against sets of paths, and what every tree must be."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.spec_decode.merge_trees import merge
from hetero_llm.spec_decode.proposals import Proposals

Path = tuple[int, ...]


def random_drafts(rng: np.random.Generator, size: int, most: int, first_kind: int) -> Proposals:
    """Trees without twins among siblings, ever less likely from node to node."""
    drafts = Proposals.empty(size)
    for row in range(size):
        left = [1.0]
        for _ in range(int(rng.integers(0, most + 1))):
            count = int(drafts.counts[row])
            parent = int(rng.integers(-1, count))
            token = int(rng.integers(4))
            known = [
                drafts.tokens[row, i] for i in range(count) if drafts.parents[row, i] == parent
            ]
            if token in known:
                continue
            chance = np.float32(rng.random() * left[parent + 1])
            left[parent + 1] -= chance
            left.append(float(chance))
            drafts.tokens[row, count], drafts.parents[row, count] = token, parent
            drafts.path_probs[row, count] = chance
            drafts.buckets[row, count] = first_kind + count
            drafts.counts[row] += 1
    return drafts


def paths(drafts: Proposals, row: int) -> list[Path]:
    found: list[Path] = []
    for node in range(int(drafts.counts[row])):
        parent = int(drafts.parents[row, node])
        assert -1 <= parent < node
        above = found[parent] if parent >= 0 else ()
        found.append((*above, int(drafts.tokens[row, node])))
    return found


def facts(drafts: Proposals, row: int) -> dict[Path, tuple[float, int]]:
    columns = drafts.path_probs[row].tolist(), drafts.buckets[row].tolist()
    return dict(zip(paths(drafts, row), zip(*columns, strict=True), strict=False))


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.integers(0, 2**31), st.integers(0, 40), st.integers(0, 63))
def test_trees_hold_the_paths_of_both(seed: int, most: int, limit: int) -> None:
    rng = np.random.default_rng(seed)
    drafts, others = random_drafts(rng, 3, most, 0), random_drafts(rng, 3, most, 1000)
    before = [facts(drafts, row) for row in range(3)]
    more = [facts(others, row) for row in range(3)]
    merge(*drafts, *others, np.full(3, limit, np.int32))
    for row in range(3):
        merged = facts(drafts, row)
        every = paths(drafts, row)
        assert len(set(every)) == len(every) == min(len({*before[row], *more[row]}), limit)
        survival = drafts.path_probs[row, : len(every)]
        assert (np.diff(survival) <= 0).all(), "the likeliest come first"
        for path, (chance, kind) in merged.items():
            if path in before[row]:
                assert (chance, kind) == before[row][path]
            else:
                assert kind == more[row][path][1] and 0 <= chance <= more[row][path][0]
            below = sum(c for p, (c, _) in merged.items() if p[:-1] == path)
            assert below <= chance * (1 + 1e-5) + 1e-6
        if limit < len({*before[row], *more[row]}):
            assert all(chance >= survival[-1] for chance, _ in merged.values())
