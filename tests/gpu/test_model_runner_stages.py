"""Two stages of a model by runners without graphs, in Triton's interpreter or on a GPU.

They sample what a runner samples that has all layers."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
        link=link,
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
