"""The tree verification kernel on a CUDA device: what verifying trees adds after sampling.

Kernel-only figures: a call's share of a CUDA graph of 100. The inputs were written just before, as
in a step, so they lie in the L2 cache. `add_us` is torch adding 1 to one number in such a graph:
what any small kernel costs.
"""

from __future__ import annotations

import numpy as np
import torch

from bench.common import bench_parser, report
from bench.gpu_timing import CALLS, call_us
from hetero_llm.gpu.kernels.tree_verify import make_verified_trees, verify_trees

VOCAB = 128256
DEVICE = torch.device("cuda")


def verify_us(num_groups: int, rows: int, accepted: int, *, tree: bool) -> float:
    """Groups of `rows` rows of which a path of `accepted` nodes is right.

    Args:
        tree: every second node is a wrong sibling, so that accepted KV has to move.
    """
    rng = np.random.default_rng(0)
    total = num_groups * rows
    sampled = rng.integers(0, VOCAB, (num_groups, rows))
    parents = np.tile(np.arange(-1, rows - 1), (num_groups, 1))
    if tree:
        parents = np.where(parents > 0, parents // 2 * 2, parents)
    drafts = np.take_along_axis(sampled, np.maximum(parents, 0), axis=1)
    depth = np.arange(rows)
    if tree:  # of the children 2k + 1 and 2k + 2 of row 2k the second one is right
        drafts[:, 1::2] = VOCAB
        depth = (depth + 1) // 2
    drafts[:, depth > accepted] = VOCAB

    def upload(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values.reshape(-1)).to(DEVICE, dtype)

    groups = np.stack(
        (np.arange(num_groups) * rows, np.full(num_groups, rows), np.arange(num_groups))
    )
    out = make_verified_trees(num_groups, total, DEVICE)
    arguments = (
        upload(sampled, torch.int64),
        upload(drafts, torch.int32),
        upload(parents, torch.int32),
    )
    options = {
        "slot_mapping": upload(np.arange(total), torch.int32),
        "groups": torch.from_numpy(groups).to(DEVICE, torch.int32),
        "last_tokens": torch.zeros(num_groups, dtype=torch.int64, device=DEVICE),
        "out": out,
    }
    time = call_us(lambda: verify_trees(*arguments, **options))
    assert (out.packed[:num_groups] == accepted + 1).all()
    assert bool((out.counts > 0).all()) == (tree and accepted > 0)
    return time


def main() -> None:
    args = bench_parser(__doc__).parse_args()
    number = torch.zeros(1, device=DEVICE)
    add_us = call_us(lambda: number.add_(1))
    trees = ((1, 0, False), (8, 0, False), (8, 7, False), (8, 3, True), (64, 63, False))
    rows = [
        {"groups": groups, "rows": width, "accepted": accepted, "moves": tree,
         "ours_us": verify_us(groups, width, accepted, tree=tree), "add_us": add_us}
        for groups in (1, 8, 64, 256)
        for width, accepted, tree in trees
    ]  # fmt: skip
    report("kernels_tree_verify", {"calls": CALLS}, rows, args.out)


if __name__ == "__main__":
    main()
