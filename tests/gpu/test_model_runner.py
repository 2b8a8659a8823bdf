"""The whole runner without graphs against the torch runner, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput
from hetero_llm.gpu import graph_set, model_runner
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.graph_set import DraftedSizes, step_buckets
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.gpu.step_buffer import StepLayout
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.model_runner import TorchModelRunner
from tests.helpers.walks import Walk
from tests.models.tiny import make_tiny_checkpoint

BLOCKS, SLOTS, MAX_LEN = 24, 4, 64


FAMILIES = [("llama", "heads_of_16"), ("opt", "heads_of_16"), ("gpt_oss", "heads_of_16")]
LAYERS = {} if torch.cuda.is_available() else {"llama": 1, "opt": 1}
"""Two, of which the interpreter takes seconds for each: there only where they differ."""


@pytest.fixture(scope="module", params=FAMILIES, ids="-".join)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, variant = request.param
    layers = LAYERS.get(family, 2)
    return make_tiny_checkpoint(tmp_path_factory.mktemp(family), family, variant, layers=layers)


def step_of(
    work: list[tuple[int, int, list[int], int]],
    admitted: tuple[AdmittedSequence, ...] = (),
    writes: list[tuple[int, int, int]] | None = None,
) -> SchedulerOutput:
    """Sequences as (slot, start, tokens, draws)."""
    return SchedulerOutput(
        request_slots=np.array([w[0] for w in work], np.int32),
        num_computed_tokens=np.array([w[1] for w in work], np.int32),
        num_scheduled_tokens=np.array([len(w[2]) for w in work], np.int32),
        token_ids=np.array([t for w in work for t in w[2]], np.int32),
        num_samples=np.array([w[3] for w in work], np.int32),
        prompt_logprob_spans=(),
        admitted=admitted,
        block_table_writes=np.array(writes or np.zeros((0, 3)), np.int32).T.reshape(3, -1),
        block_copies=np.zeros((2, 0), np.int32),
    )


def steps(num_logprobs: int | None = None) -> list[SchedulerOutput]:
    """Prompts in chunks, decoding with tokens that only the device knows, several draws."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, n).tolist() for n in (20, 5, 17)]
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=9, top_p=0.9, seed=3),
        SamplingParams(temperature=1.3, n=2, seed=4),
    ]
    states = tuple(
        AdmittedSequence(i, tuple(p), len(p), q, q.seed or 0, 0, num_logprobs)
        for i, (p, q) in enumerate(zip(prompts, params))
    )
    blocks = rng.permutation(BLOCKS)
    writes = [
        (slot, column, int(blocks[slot * 4 + column])) for slot in range(3) for column in range(3)
    ]
    return [
        step_of(
            [(0, 0, prompts[0], 1), (1, 0, prompts[1], 1), (2, 0, prompts[2][:10], 0)],
            states,
            writes,
        ),
        step_of([(0, 20, [-1], 1), (1, 5, [-1], 1), (2, 10, prompts[2][10:], 2)]),
        step_of([(0, 21, [-1], 1), (1, 6, [-1], 1)]),
        step_of([(1, 7, [-1], 1), (0, 22, [7], 1)]),
    ]


def build(checkpoint: Path, device: torch.device) -> tuple[ModelConfig, CausalLM, PagedKVCache]:
    config = load_model_config(checkpoint)
    model = load_model(checkpoint, config, dtype=torch.float32, device=device, show_progress=False)
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
    return config, model, PagedKVCache(shape, BLOCKS, device)


@pytest.mark.parametrize(
    ("checkpoint", "num_logprobs"),
    zip(FAMILIES, (2, None, 2)),
    indirect=["checkpoint"],
    ids=["llama", "opt", "gpt_oss"],
)
def test_it_draws_what_the_torch_runner_draws(
    checkpoint: Path, num_logprobs: int | None, device: torch.device
) -> None:
    config, model, cache = build(checkpoint, device)
    reference = TorchModelRunner(
        model, config, cache, max_num_seqs=SLOTS, max_model_len=MAX_LEN, device=device
    )
    work = steps(num_logprobs)
    expected = [reference.finish(reference.launch(step)) for step in work]
    config, model, cache = build(checkpoint, device)
    speed_up(model)
    runner = GpuModelRunner(
        model,
        config,
        cache,
        max_num_seqs=SLOTS,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=64,
        graphs=False,
    )
    launched = [runner.launch(step) for step in work[:2]]  # two steps under way
    ours = [runner.finish(pending) for pending in launched]
    ours += [runner.finish(runner.launch(step)) for step in work[2:]]
    assert [o.token_ids for o in ours] == [o.token_ids for o in expected]
    for output, wanted in zip(ours, expected):
        assert (output.logprobs is None) == (num_logprobs is None)
        for entry, other in zip(output.logprobs or (), wanted.logprobs or ()):
            assert entry.rank == other.rank and entry.top[0][0] == other.top[0][0]
            assert entry.sampled == pytest.approx(other.sampled, abs=1e-4)


def test_a_dry_runner_has_the_bodies_of_all_graphs(
    checkpoint: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And captures none of them."""
    if device.type == "cpu":
        monkeypatch.setattr(model_runner, "GraphSet", dict)
    config, model, cache = build(checkpoint, device)
    speed_up(model)
    sizes = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN, "max_num_batched_tokens": 16}
    runner = GpuModelRunner(
        model, config, cache, graphs=True, dry=True, most_drafted_tokens=16, **sizes
    )
    assert runner.graphs is None and runner.profile == []
    buckets = step_buckets(SLOTS, 16, most_drafted_tokens=16)
    decoding, others = len(buckets.decode), len(buckets.tokens) + 2 * len(buckets.verify)
    # Of decoding: also short, and head alone; then mixtures of larger steps, processed logits.
    assert len(runner.bodies) == 3 * decoding + others + 2
    with torch.inference_mode():
        for body in (runner.bodies[0], *runner.bodies[-2:]):
            body()


class _NoGraphs(dict):
    """In the place of a `GraphSet`: nothing is captured, and a replay does nothing."""

    def capture(self, key: Any, body: Any) -> None:
        self[key] = body

    def replay(self, key: Any) -> None:
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing of the device is looked at")
def test_a_launch_has_few_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of docs/architecture.md, on the host's side of replayed graphs."""
    monkeypatch.setattr(model_runner, "GraphSet", _NoGraphs)
    monkeypatch.setattr(graph_set, "replay_seconds", lambda _, keys: [1e-3] * len(keys))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    checkpoint = make_tiny_checkpoint(tmp_path, "llama", "heads_of_16", layers=1)
    config, model, cache = build(checkpoint, torch.device("cpu"))
    speed_up(model)
    sizes = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN, "max_num_batched_tokens": 64}
    runner = GpuModelRunner(model, config, cache, graphs=True, most_drafted_tokens=32, **sizes)
    prompts, rest, plain, _ = steps()
    drafted = dataclasses.replace(
        step_of([(0, 22, [5], 1), (1, 7, [5], 1)], writes=[(0, 2, 3)]),
        num_scheduled_tokens=np.array([3, 3], np.int32),
        drafts=DraftBatch(
            np.array([2, 2], np.int32), np.array([6, 7] * 2, np.int32),
            np.array([-1, 0] * 2, np.int32),
        ),
    )  # fmt: skip
    for step in (prompts, rest):
        runner.launch(step)
    for step, most, name in ((plain, 21, "replay_step"), (drafted, 25, "replay_verify")):
        with Walk() as walk:
            runner.launch(step)
        assert walk.num_stops <= most, walk.functions
        assert any(function.endswith(name) for _, function in walk.functions)


def test_the_last_layer_goes_on_with_sampled_rows(checkpoint: Path, device: torch.device) -> None:
    """Chunks of 20, 5 and 10 tokens of which two are sampled after; then one of 7 tokens that is
    sampled after twice, beside two that decode; then a chunk that is not sampled after."""
    config, model, cache = build(checkpoint, device)
    rows: list[int] = []
    model.layers[-1].mlp.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    sizes = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN, "max_num_batched_tokens": 64}
    runner = GpuModelRunner(model, config, cache, graphs=False, **sizes)
    for step in (*steps()[:2], step_of([(3, 0, [5, 6, 7], 0)], writes=[(3, 0, 23)])):
        runner.finish(runner.launch(step))
    assert rows == [2, 4, 1]


def test_soft_caps_and_alibi_reach_the_kernel(tmp_path: Path, device: torch.device) -> None:
    """Chunks, then decoding beside the rest of a prompt, with both set for a model without them."""
    folder = make_tiny_checkpoint(tmp_path, "llama", "heads_of_16", layers=1)
    outputs = []
    for kernels, change in (
        (False, {}),
        (False, {"attn_softcap": 0.5, "alibi_slopes": (0.5, 0.3, 0.2, 0.1)}),
        (True, {"attn_softcap": 0.5, "alibi_slopes": (0.5, 0.3, 0.2, 0.1)}),
    ):
        config, model, cache = build(folder, device)
        config = dataclasses.replace(config, **change)
        sizes = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN}
        runner: Any = TorchModelRunner(model, config, cache, device=device, **sizes)
        if kernels:
            runner = GpuModelRunner(
                model, config, cache, max_num_batched_tokens=64, graphs=False, **sizes
            )
        work = [runner.finish(runner.launch(step)) for step in steps(2)[:2]]
        outputs.append(torch.tensor([e.sampled for o in work for e in o.logprobs]))
    plain, torchs, ours = outputs
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
    assert float((plain - torchs).abs().max()) > 1e-2


def test_scales_of_an_fp8_cache_take_back_what_the_weights_add(
    checkpoint: Path, device: torch.device
) -> None:
    """Each head's keys and values times a power of two, taken off again from queries and from the
    output projection: with these scales the cache has the same codes, and the model the same
    logits. Without, the values would be too large for e4m3."""
    prompt = (5, 60, 7, 80, 9)
    greedy = AdmittedSequence(0, prompt, 5, SamplingParams(temperature=0.0), 0, 0, 8)
    step = step_of([(0, 0, list(prompt), 1)], (greedy,), [(0, 0, 3)])
    outputs, codes = [], []
    for scaled in (False, True):
        config, model, cache = build(checkpoint, device)
        shape = dataclasses.replace(cache.shape, dtype=torch.float8_e4m3fn)
        heads, dim, layers = config.num_kv_heads, config.head_dim, config.num_layers
        keys = 2.0 ** (10 + torch.arange(heads, device=device))
        values = 2.0 ** (14 - torch.arange(heads, device=device))
        scales = torch.stack((keys, values)).expand(layers, -1, -1) if scaled else None
        cache = PagedKVCache(shape, BLOCKS, device, scales)
        group = config.num_heads // heads
        rows = torch.cat((1 / keys.repeat_interleave(group), keys, values)).repeat_interleave(dim)
        for layer in model.layers if scaled else ():
            for parameter in layer.attention.qkv_proj.parameters():
                parameter *= rows.view(-1, *[1] * (parameter.dim() - 1))
            layer.attention.out_proj.weight /= values.repeat_interleave(group * dim)
        speed_up(model)
        sizes = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN, "max_num_batched_tokens": 64}
        runner = GpuModelRunner(model, config, cache, graphs=False, **sizes)
        found = runner.finish(runner.launch(step)).logprobs
        outputs.append(torch.tensor([logprob for _, logprob in found[0].top]))
        codes.append(cache.data.view(torch.uint8))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(codes[0], codes[1]) and codes[0].any()


class RecordingGraphs:
    """In the place of captured graphs: says that each drafted step was replayed."""

    def __init__(self, holds: bool) -> None:
        self.layout = StepLayout(8, 8, 8, 8, 8, 1, 8) if holds else None
        self.modes: list[bool] = []

    def replay_verify(
        self, step: SchedulerOutput, sizes: DraftedSizes, *, plain: bool, adapted: bool
    ) -> Any:
        assert not adapted
        assert (sizes.num_tokens, sizes.num_samples, sizes.num_groups) == (4, 4, 2)
        self.modes.append(torch.is_inference_mode_enabled())
        return self.layout


@pytest.mark.parametrize("checkpoint", FAMILIES[:1], indirect=True)
@pytest.mark.parametrize("holds", [True, False])
def test_only_what_calls_torch_enters_the_inference_mode(
    checkpoint: Path, device: torch.device, holds: bool
) -> None:
    config, model, cache = build(checkpoint, device)
    speed_up(model)
    runner: Any = GpuModelRunner(
        model, config, cache, max_num_seqs=SLOTS, max_model_len=MAX_LEN,
        max_num_batched_tokens=64, graphs=False, most_drafted_tokens=64,
    )  # fmt: skip
    runner.launch(steps()[0])
    graphs = runner.graphs = RecordingGraphs(holds)
    drafts = DraftBatch(*(np.array(v, np.int32) for v in ([2, 0], [5, 6], [-1, 0])))
    work = step_of([(0, 20, [4, 5, 6], 1), (1, 5, [7], 1)], writes=[(0, 2, 5)])
    step = dataclasses.replace(work, token_ids=np.array([4, 7], np.int32), drafts=drafts)
    copies = np.array([[0], [1]], np.int32)
    launched = [runner.launch(step), runner.launch(dataclasses.replace(step, block_copies=copies))]
    assert runner.filler.block_tables[0, 2] == 5
    if holds:
        assert graphs.modes == [False, True]
        assert [one.num_groups for one in launched] == [8, 8]
    else:  # asked once more on the way that runs without a graph
        assert graphs.modes == [False, True, True]
        assert [one.num_groups for one in launched] == [2, 2]


def test_a_tree_yields_what_plain_steps_yield(checkpoint: Path, device: torch.device) -> None:
    """The right path is the second child and its child, so its KV has to move."""
    outputs: list[list[int]] = []
    for drafted in (False, True):
        config, model, cache = build(checkpoint, device)
        speed_up(model)
        runner = GpuModelRunner(
            model,
            config,
            cache,
            max_num_seqs=SLOTS,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=64,
            graphs=False,
            most_drafted_tokens=64 if drafted else 0,
        )
        for step in steps()[:2]:
            last = runner.finish(runner.launch(step)).token_ids
        if not drafted:
            tokens = []
            for position in range(21, 25):
                work = [(0, position, [-1], 1)] + [(1, 6, [-1], 1)] * (position == 21)
                tokens.append(runner.finish(runner.launch(step_of(work))).token_ids)
            outputs = tokens
            continue
        right = [step[0] for step in outputs]
        wrong = (right[0] + 1) % 90
        drafts = [last[0], wrong, right[0], right[1], right[1]]
        step = step_of([(0, 21, drafts, 1), (1, 6, [-1], 1)])
        nodes = ([4, 0], drafts[1:], [-1, -1, 0, 1])
        batch = DraftBatch(*(np.array(values, np.int32) for values in nodes))
        known = step.token_ids[[0, 5]]
        step = dataclasses.replace(step, token_ids=known, drafts=batch)
        output = runner.finish(runner.launch(step))
        assert output.num_tokens == [3, 1]
        assert output.token_ids == [*right[:3], outputs[0][1]]
        # Decoding goes on over the moved KV.
        output = runner.finish(runner.launch(step_of([(0, 24, [-1], 1)])))
        assert output.token_ids == [right[3]]
