"""Verification of draft trees: the nodes that the target agrees with, and its next token.

At each visited node the target's token has been sampled once, at the node's own position. If a
child carries that token, the node is accepted and visited next; else the token is the last one of
this step. So the tokens are those of plain decoding, whatever was drafted.

One program of one warp verifies one tree, whose rows it holds in registers. Wrapper `verify_trees`,
reference `verify_trees_reference`; timed by `bench.kernels.tree_verify`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import pdl_options, wait_and_release

MAX_ROWS = 64
"""Rows of one tree, its root included."""


@dataclass(frozen=True, slots=True)
class VerifiedTrees:
    """Results of N sampled rows in G groups.

    Attributes:
        packed: [G + N] int64, one piece so that one copy downloads it: how many tokens each group
            yields (0 for padding), then the rows' tokens. A group's tokens lie at its first rows;
            its other entries are undefined.
        sources, destinations: [G, 64] int64 KV slots, the moves of accepted nodes; counts: [G]
            int32 moves in use. `compact_kv` takes all three.
    """

    packed: torch.Tensor
    sources: torch.Tensor
    destinations: torch.Tensor
    counts: torch.Tensor

    def part(self, num_groups: int, num_rows: int) -> VerifiedTrees:
        """Views into the same memory for fewer groups and rows."""
        return VerifiedTrees(
            self.packed[: num_groups + num_rows],
            self.sources[:num_groups],
            self.destinations[:num_groups],
            self.counts[:num_groups],
        )


def make_verified_trees(num_groups: int, num_rows: int, device: torch.device) -> VerifiedTrees:
    """Memory for the results of up to `num_rows` rows in `num_groups` groups."""

    def make(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return VerifiedTrees(
        make(num_groups + num_rows),
        make(num_groups, MAX_ROWS),
        make(num_groups, MAX_ROWS),
        make(num_groups, dtype=torch.int32),
    )


@triton.jit(do_not_specialize=["group_stride"])
def _verify(
    sampled_ptr, draft_ptr, parent_ptr, slot_mapping_ptr, group_ptr, group_stride, last_ptr,
    emitted_ptr, token_ptr, source_ptr, destination_ptr, count_ptr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_release(PDL)
    group = tl.program_id(0)
    first = tl.load(group_ptr + group)
    count = tl.load(group_ptr + group_stride + group)
    slot = tl.load(group_ptr + 2 * group_stride + group)
    lane = tl.arange(0, ROWS)
    real = lane < count
    sampled = tl.load(sampled_ptr + first + lane, mask=real, other=-1).to(tl.int32)
    draft = tl.load(draft_ptr + first + lane, mask=real, other=-1)
    parent = tl.load(parent_ptr + first + lane, mask=real, other=-1)

    tokens = tl.zeros((ROWS,), tl.int32)
    path = lane  # row of the k-th visited node
    token = -1
    visited = 0
    at = tl.where(count > 0, 0, ROWS)
    while at < ROWS:
        token = tl.max(tl.where(lane == at, sampled, -1))
        tokens = tl.where(lane == visited, token, tokens)
        path = tl.where(lane == visited, at, path)
        visited += 1
        child = real & (lane > at) & (parent == at) & (draft == token)
        at = tl.min(tl.where(child, lane, ROWS))

    tl.store(token_ptr + first + lane, tokens.to(tl.int64), mask=lane < visited)
    tl.store(emitted_ptr + group, visited.to(tl.int64))
    if slot >= 0:
        tl.store(last_ptr + slot, token.to(tl.int64))
    moved = tl.max(tl.where(path != lane, 1, 0)) > 0
    tl.store(count_ptr + group, tl.where(moved, visited - 1, 0))
    if moved:
        accepted = (lane > 0) & (lane < visited)
        source = tl.load(slot_mapping_ptr + first + path, mask=accepted, other=0)
        destination = tl.load(slot_mapping_ptr + first + lane, mask=accepted, other=0)
        place = group.to(tl.int64) * ROWS + lane - 1
        tl.store(source_ptr + place, source.to(tl.int64), mask=accepted)
        tl.store(destination_ptr + place, destination.to(tl.int64), mask=accepted)


def verify_trees(
    sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    *,
    slot_mapping: torch.Tensor,
    groups: torch.Tensor,
    last_tokens: torch.Tensor,
    out: VerifiedTrees,
) -> None:
    """Follows the sampled tokens through the tree of every group; a plain sample is a group of one.

    The rows of a group are consecutive, the root first and parents before their children. Rows of
    no group are left alone.

    Args:
        sampled: [N] int64 the target's token after each row, less than 2**31.
        draft_tokens: [N] int32 each row's own token; those of roots are not read.
        parents: [N] int32 index of the parent row within the group; -1 for the root. Of children
            with the same token the first counts.
        slot_mapping: [N] int32 KV slot (block * block size + offset) of each row.
        groups: [3, G] int32 first row, number of rows (at most `MAX_ROWS`), request slot. A padding
            group has no rows and slot -1. Of groups with the same slot any may be the last to
            write.
        last_tokens: [slots] int64, written: each request slot's last token.
        out: of exactly N rows and G groups. The k-th accepted node moves from its own KV slot to
            that of row k of the group; there are no moves if all are in place.
    """
    num_groups = groups.shape[1]
    (num_rows,) = sampled.shape
    assert sampled.dtype == last_tokens.dtype == torch.int64
    assert sampled.is_contiguous() and last_tokens.is_contiguous() and last_tokens.ndim == 1
    for rows in (draft_tokens, parents, slot_mapping):
        assert rows.shape == (num_rows,) and rows.dtype == torch.int32 and rows.is_contiguous()
    assert groups.shape[0] == 3 and groups.dtype == torch.int32
    assert num_groups < 2 or groups.stride(1) == 1
    assert out.packed.shape == (num_groups + num_rows,) and out.packed.is_contiguous()
    for moves in (out.sources, out.destinations):
        assert moves.shape == (num_groups, MAX_ROWS) and moves.is_contiguous()
    assert out.counts.shape == (num_groups,) and out.counts.is_contiguous()
    assert out.packed.dtype == out.sources.dtype == out.destinations.dtype == torch.int64
    assert out.counts.dtype == torch.int32
    if num_groups == 0:
        return
    _verify[(num_groups,)](
        sampled,
        draft_tokens,
        parents,
        slot_mapping,
        groups,
        groups.stride(0),
        last_tokens,
        out.packed,
        out.packed[num_groups:],
        out.sources,
        out.destinations,
        out.counts,
        ROWS=MAX_ROWS,
        num_warps=1,
        **pdl_options(sampled.device),
    )


def verify_trees_reference(
    sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    *,
    slot_mapping: torch.Tensor,
    groups: torch.Tensor,
    last_tokens: torch.Tensor,
    out: VerifiedTrees,
) -> None:
    """`verify_trees` in plain torch, one node at a time."""
    num_groups = groups.shape[1]
    for group, (first, count, slot) in enumerate(groups.T.tolist()):
        out.packed[group] = out.counts[group] = 0
        if not count:
            continue
        rows = slice(first, first + count)
        targets, drafts, own = (t[rows].tolist() for t in (sampled, draft_tokens, parents))
        path = [0]
        while True:
            at = path[-1]
            fitting = [i for i in range(at + 1, count) if own[i] == at and drafts[i] == targets[at]]
            if not fitting:
                break
            path.append(fitting[0])
        tokens = [targets[row] for row in path]
        out.packed[group] = len(tokens)
        begin = num_groups + first
        out.packed[begin : begin + len(tokens)] = torch.tensor(tokens)
        last_tokens[slot] = tokens[-1]
        if path != list(range(len(path))):
            accepted = len(path) - 1
            out.counts[group] = accepted
            out.sources[group, :accepted] = slot_mapping[rows][torch.tensor(path[1:])].long()
            out.destinations[group, :accepted] = slot_mapping[first + 1 : first + len(path)].long()
