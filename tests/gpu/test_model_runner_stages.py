"""Two stages of a model by runners without graphs, in Triton's interpreter or on a GPU.

They sample what a runner samples that has all layers, and verify draft trees."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.models.collectives import NO_LINK, OneRank, Rank, StageLink
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.sharding import sharded_config
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from tests.gpu.test_model_runner import BLOCKS, MAX_LEN, SLOTS, step_of, steps
from tests.models.tiny import make_tiny_checkpoint


class Queue:
    """`StageLink` between two runners of one process."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()

    def receive(self, out: Tensor) -> None:
        out.copy_(self.sent.popleft())

    def send(self, x: Tensor) -> None:
        self.sent.append(x)


def runner_of(folder: Path, rank: Rank, link: StageLink, device: torch.device) -> Any:
    config = load_model_config(folder)
    model = load_model(
        folder, config,
        dtype=torch.float32, device=device, show_progress=False, collectives=OneRank(rank),
    )  # fmt: skip
    speed_up(model)
    own = sharded_config(config, rank)
    shape = KVCacheShape(own.num_layers, own.num_kv_heads, own.head_dim, 16, torch.float32)
    return GpuModelRunner(
        model, own, PagedKVCache(shape, BLOCKS, device),
        max_num_seqs=SLOTS, max_model_len=MAX_LEN, max_num_batched_tokens=64, graphs=False,
        most_drafted_tokens=64, link=link,
    )  # fmt: skip


LAYERS = 3 if torch.cuda.is_available() else 2  # the interpreter takes seconds for each


@pytest.mark.parametrize(("family", "num_logprobs"), [("llama", None), ("gpt_oss", 2)])
def test_tokens_of_all_layers(
    tmp_path: Path, family: str, num_logprobs: int | None, device: torch.device
) -> None:
    """Chunks, and two steps under way at the first stage before the second one begins."""
    folder = make_tiny_checkpoint(tmp_path, family, "heads_of_16", layers=LAYERS)
    first, decoding = steps(num_logprobs)[:2]
    whole = runner_of(folder, Rank(0, 1), NO_LINK, device)
    expected = [whole.finish(whole.launch(step)) for step in (first, decoding)]

    tokens = expected[0].token_ids
    prompt = decoding.token_ids[decoding.token_ids >= 0].tolist()  # its tokens come from the host
    known = step_of([(0, 20, tokens[:1], 1), (1, 5, tokens[1:2], 1), (2, 10, prompt, 2)])
    link = Queue()
    begin, end = (runner_of(folder, Rank(0, 1, stage, 2), link, device) for stage in (0, 1))
    sent = [begin.launch(step) for step in (first, known)]
    assert [len(x) for x in link.sent] == [35, 9]
    assert [begin.finish(pending).token_ids for pending in sent] == [[], []]
    found = [end.finish(end.launch(step)) for step in (first, known)]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert found[0].logprobs == expected[0].logprobs


@pytest.mark.parametrize("penalty", [1.0, 1.3], ids=["by the kernels", "by depth"])
def test_drafts(tmp_path: Path, penalty: float, device: torch.device) -> None:
    """A tree whose accepted nodes leave gaps, beside a sequence without one; the step behind it
    reads what was moved in the first stage. Sampling by depth comes behind another step."""
    folder = make_tiny_checkpoint(tmp_path, "llama", "heads_of_16", layers=2)
    first = steps(None)[0]
    greedy = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    admitted = dataclasses.replace(first.admitted[0], params=greedy), *first.admitted[1:]
    first = dataclasses.replace(first, admitted=admitted)
    whole = runner_of(folder, Rank(0, 1), NO_LINK, device)
    tokens = [whole.finish(whole.launch(first)).token_ids[0]]
    for start in range(20, 24):
        step = step_of([(0, start, tokens[-1:], 1)])
        tokens += whole.finish(whole.launch(step)).token_ids

    link = Queue()
    begin, end = (runner_of(folder, Rank(0, 1, stage, 2), link, device) for stage in (0, 1))
    for stage in (begin, end):
        stage.finish(stage.launch(first))
    wrong = (tokens[1] + 1) % 90
    nodes = [wrong, tokens[1], wrong, tokens[2]]
    drafts = DraftBatch(*(np.array(x, np.int32) for x in ([4, 0], nodes, [-1, -1, 0, 1])))
    drafted = step_of([(0, 20, [tokens[0], *nodes], 1), (1, 5, [9], 1)])
    drafted = dataclasses.replace(
        drafted, token_ids=np.array([tokens[0], 9], np.int32), drafts=drafts
    )
    chunk = step_of([(2, 10, [4, 5, 6], 0)])
    for step in (drafted, chunk):
        begin.finish(begin.launch(step))
    pending = [end.launch(step) for step in (drafted, chunk)]
    found = end.finish(pending[0])
    end.finish(pending[1])
    assert found.num_tokens == [3, 1] and found.token_ids[:3] == tokens[1:4]
    table = first.block_table_writes[2, :3] * 16  # of slot 0
    places = [int(table[at // 16]) + at % 16 for at in (22, 24, 21, 22)]
    begin.cache.move_tokens(*np.array(places).reshape(2, 2))
    behind = step_of([(0, 23, tokens[3:4], 1)])
    begin.finish(begin.launch(behind))
    assert end.finish(end.launch(behind)).token_ids == tokens[4:5]
