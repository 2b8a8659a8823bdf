"""The draft model against a slow reference, a fresh model and transformers: prompts in chunks,
trees grown over steps, commits that keep parts of them, windows that drop blocks."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from hetero_llm.core.errors import ConfigError, ModelLoadError, PromptError
from hetero_llm.cpu import native
from hetero_llm.cpu.draft_worker import draft_model as draft_model
from hetero_llm.cpu.draft_worker.draft_model import DraftModel, DraftSizes, Found, best_format
from hetero_llm.cpu.draft_worker.kv_layout import PrefixTokens, no_tree_nodes
from hetero_llm.cpu.draft_worker.torch_path import likeliest
from hetero_llm.cpu.draft_worker.tree_ops import WINDOW, TreeNodes
from hetero_llm.cpu.draft_worker.tree_pool import TreePool
from hetero_llm.demo_models import demo_folder, heldout_prompts
from hetero_llm.models.loader import load_model
from hetero_llm.models.quantized_writer import write_quantized
from hetero_llm.models.read_config import load_model_config
from hetero_llm.quantization.names import OnlineName
from hetero_llm.spec_decode.draft_model.node_buckets import BucketStats
from tests.cpu.draft_worker.draft_reference import Memory, SequenceReference
from tests.helpers.gguf_files import make_tiny_gguf
from tests.spec_decode.draft_model.played import Played, keep, numbers, play

VOCAB, POSITIONS, SLOTS = 203, 320, 5
SIZES = DraftSizes(SLOTS, POSITIONS, window=POSITIONS // 16 * 16, most_rows=96, candidates=5)
SMALL = DraftSizes(SLOTS, POSITIONS, window=16, most_rows=96, candidates=5)
BACKENDS = ("native", "torch", "torch with our attention")
NO_TRUNK = PrefixTokens(np.zeros(0, np.int32), np.zeros(0, np.int32))

Load = Callable[..., DraftModel]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("draft")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch, whose own would get in the executor's way on a small machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BACKENDS)
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a float32 model through one of the ways to run it."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("needs the compiled library")
    elif request.param != "native":
        monkeypatch.setattr(draft_model, "unsupported_reason", lambda *_: "it is a test")

    def load_it(folder: Path, sizes: DraftSizes, **other: Any) -> DraftModel:
        found = DraftModel.load(
            folder, sizes, dtype=torch.float32, weight_format="float", threads=1, **other
        )
        assert found.backend == request.param.split()[0]
        return found

    return load_it


def any_way(folder: Path, sizes: DraftSizes, **other: Any) -> DraftModel:
    arguments = {"dtype": torch.float32, "weight_format": "float", "threads": 1, **other}
    return DraftModel.load(folder, sizes, **arguments)


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def run_pending(model: DraftModel, most_rows: int = 96) -> list[Found]:
    """Steps without branches until nothing waits; copies."""
    found = []
    while len((prefix := model.kv_layout.plan_prefix(most_rows)).slots):
        step = model.step(prefix, no_tree_nodes())
        found.append(Found(*(values.copy() for values in step)))
    return found


def num_turned(model: DraftModel) -> int:
    """Slots whose blocks are not in the order that they had at first."""
    tables = model.kv_layout.block_tables
    return int((tables[:, 1:] != np.sort(tables[:, 1:])).any(axis=1).sum())


@pytest.mark.parametrize("sizes", [SIZES, SMALL], ids=["all is seen", "blocks are dropped"])
def test_trees_and_commits_as_the_reference(
    checkpoint: Path, load: Load, sizes: DraftSizes
) -> None:
    model = load(checkpoint, sizes)
    memory = Memory(_plain_model(checkpoint))
    rng = random.Random(5)
    played = []
    draws = [(0.0, 0, 0), (0.7, 2**63 + 11, 0), (1.4, 3, 2), (0.0, 0, 0), (0.0, 0, 0)]
    for slot, (length, draw) in enumerate(zip((150, 3, 40, 16, 77), draws, strict=True)):
        reference = SequenceReference(
            memory, sizes.window, model.kv_layout.capacity, tokens_of(slot, length), *draw
        )
        assert model.kv_layout.capacity >= min(16 + sizes.window, POSITIONS)
        played.append(Played(model, slot, reference))
        assert model.kv_layout.pending(slot) == len(reference.positions_to_run())
    for _ in range(40):
        play(model, played, rng)
    assert sum(one.num_kept for one in played) > 10
    assert num_turned(model) >= (2 if sizes is SMALL else 0)


def test_a_mixture_of_experts_drafts_as_the_reference(tmp_path: Path, load: Load) -> None:
    torch.manual_seed(1)
    config = transformers.Qwen2MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=POSITIONS,
        initializer_range=0.1, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40,
        shared_expert_intermediate_size=56, mlp_only_layers=[1],
    )  # fmt: skip
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(tmp_path)
    model = load(tmp_path, SIZES)
    memory = Memory(_plain_model(tmp_path))
    played = [
        Played(
            model,
            slot,
            SequenceReference(
                memory, SIZES.window, model.kv_layout.capacity, tokens_of(slot, length)
            ),
        )
        for slot, length in enumerate((50, 3))
    ]
    rng = random.Random(6)
    for _ in range(40):
        play(model, played, rng)
    assert sum(one.num_kept for one in played) > 0


def test_full_windows(checkpoint: Path, load: Load) -> None:
    """Trees that use every place, behind trunks that are full, too."""
    model = load(checkpoint, replace(SMALL, slots=2))
    memory = Memory(_plain_model(checkpoint))
    rng = random.Random(3)
    played = []
    for slot in range(2):
        reference = SequenceReference(
            memory, 16, model.kv_layout.capacity, tokens_of(slot, 60 + 9 * slot)
        )
        played.append(Played(model, slot, reference))
        played[slot].until, played[slot].most = WINDOW, 0
    while any(model.kv_layout.pending(slot) for slot in range(2)):
        play(model, played, rng)
    for one in played:
        one.go_on(tokens_of(9, 15))  # to the brim
        one.most = 30
    last = set()
    for _ in range(40):
        play(model, played, rng)
        last |= {len(one.reference.prefix) + len(one.nodes) for one in played}
    assert num_turned(model) == 2
    assert max(last) > model.kv_layout.capacity + WINDOW - 16, "the last block was used"


def test_a_played_model_equals_a_fresh_one(checkpoint: Path, load: Load) -> None:
    model = load(checkpoint, SIZES)
    text = tokens_of(1, 60)
    model.kv_layout.open(2, numbers(text))
    run_pending(model, 17)
    chain = tokens_of(2, 6)
    for place, token in enumerate(chain):  # a chain at every second place, a leaf beside each node
        own = 2 * place
        above = sum(1 << 2 * i for i in range(place + 1))
        found = model.step(
            NO_TRUNK,
            TreeNodes(
                numbers([2]),
                numbers([2]),
                numbers([token, 5]),
                numbers([place + 1] * 2),
                numbers([own, own + 1]),
                np.array([above, above ^ 1 << own ^ 1 << (own + 1)], np.uint64),
            ),
        )
    last = found.tokens[0].copy(), found.log_probs[0].copy()
    model.kv_layout.append(2, numbers([*chain, 9, 8]))
    keep(model, 2, [0, 2, 4, 6, 8, 10], list(range(6)), 6)
    assert model.kv_layout.pending(2) == 2
    after = run_pending(model)[-1]

    fresh = load(checkpoint, SIZES)
    fresh.kv_layout.open(0, numbers([*text, *chain]))
    fresh.kv_layout.open(1, numbers([*text, *chain, 9, 8]))
    by_slot = {
        int(slot): (found.tokens[i], found.log_probs[i])
        for found in run_pending(fresh, 33)
        for i, slot in enumerate(found.ready)
    }
    for ours, slot in ((last, 0), ((after.tokens[0], after.log_probs[0]), 1)):
        assert ours[0].tolist() == by_slot[slot][0].tolist()
        np.testing.assert_allclose(ours[1], by_slot[slot][1], atol=1e-4, rtol=0)


def test_long_texts_are_run_in_part(checkpoint: Path, load: Load) -> None:
    """Of a prompt the sink and the last tokens; of a commit beyond the window the last ones."""
    model = load(checkpoint, SMALL)
    model.kv_layout.open(0, numbers(tokens_of(0, 300)))
    assert (
        model.kv_layout.pending(0) == 16 + 16
        and len(model.kv_layout.token_ids(0)) == 300
        and model.kv_layout.room(0) == 20
    )
    run_pending(model)
    assert model.kv_layout.pending(0) == 0
    model.kv_layout.open(1, numbers(tokens_of(1, 20)))
    run_pending(model)
    model.kv_layout.append(1, numbers(tokens_of(2, 15)))
    assert model.kv_layout.pending(1) == 15
    model.kv_layout.append(1, numbers(tokens_of(3, 15)))
    assert model.kv_layout.pending(1) == 16


def test_short_texts_go_first(checkpoint: Path) -> None:
    model = any_way(checkpoint, SIZES)
    for slot, length in enumerate((90, 3, 200, 40)):
        model.kv_layout.open(slot, numbers(tokens_of(slot, length)))

    def plan(most_rows: int) -> list[tuple[int, int]]:
        prefix = model.kv_layout.plan_prefix(most_rows)
        return list(zip(prefix.slots.tolist(), prefix.counts.tolist(), strict=True))

    assert plan(50) == [(1, 3), (3, 40), (0, 7)]
    assert plan(3) == [(1, 3)]
    assert plan(0) == []
    assert plan(1000) == [(1, 3), (3, 40), (0, 90), (2, 200)]
    found = model.step(model.kv_layout.plan_prefix(50), no_tree_nodes())
    assert found.ready.tolist() == [1, 3] and found.tokens.shape == (2, SIZES.candidates)
    assert plan(96) == [(0, 83), (2, 13)]
    model.kv_layout.close(0)
    assert plan(96) == [(2, 96)]
    run_pending(model)
    assert plan(96) == []


def test_a_slot_is_used_again(checkpoint: Path, load: Load) -> None:
    model = load(checkpoint, SIZES)
    text = numbers(tokens_of(7, 50))
    model.kv_layout.open(0, text)
    first = run_pending(model)[-1]
    model.kv_layout.close(0)
    model.kv_layout.open(0, numbers(tokens_of(8, 120)), temperature=0.5, seed=1)
    run_pending(model)
    model.kv_layout.open(0, text)
    again = run_pending(model)[-1]
    assert first.tokens.tolist() == again.tokens.tolist()
    np.testing.assert_array_equal(first.log_probs, again.log_probs)


def test_texts_that_it_cannot_take(checkpoint: Path) -> None:
    model = any_way(checkpoint, SIZES)
    model.kv_layout.open(0, numbers([1, 2]))
    for wrong in (VOCAB, -1):
        with pytest.raises(PromptError, match=rf"tokens={wrong}: .*vocabulary has {VOCAB}"):
            model.kv_layout.append(0, numbers([4, wrong, 5]))
    with pytest.raises(PromptError, match=rf"tokens={POSITIONS + 1}: .*context has {POSITIONS}"):
        model.kv_layout.append(0, numbers([3] * (POSITIONS - 1)))
    assert len(model.kv_layout.token_ids(0)) == model.kv_layout.pending(0) == 2
    model.kv_layout.append(0, numbers([3] * (POSITIONS - 2)))
    assert model.kv_layout.room(0) == 0
    with pytest.raises(PromptError):
        model.kv_layout.open(1, numbers([VOCAB]))
    assert model.kv_layout.pending(1) == 0


def test_misuse_is_an_error(checkpoint: Path) -> None:
    model = any_way(checkpoint, SIZES)
    model.kv_layout.open(0, numbers(tokens_of(0, 30)))

    def node(slot: int, depth: int = 1, place: int = 0) -> TreeNodes:
        bits = np.array([1 << place % WINDOW], np.uint64)
        return TreeNodes(*(numbers([v]) for v in (slot, 1, 3, depth, place)), bits)

    for slot in (0, 1):
        with pytest.raises(AssertionError, match="root was not run"):
            model.step(NO_TRUNK, node(slot))
    with pytest.raises(AssertionError, match="fewer pending"):
        model.step(PrefixTokens(numbers([0]), numbers([31])), no_tree_nodes())
    run_pending(model)
    with pytest.raises(AssertionError, match="follow each other"):
        model.step(NO_TRUNK, node(0, place=WINDOW))
    with pytest.raises(AssertionError, match="deeper"):
        model.step(NO_TRUNK, node(0, depth=POSITIONS - 30 + 1))
    with pytest.raises(AssertionError, match="outside the window"):
        keep(model, 0, [0], [1], 0)
    with pytest.raises(AssertionError, match="beyond the sequence"):
        keep(model, 0, [0], [0], 1)
    assert len(model.step(NO_TRUNK, node(0, depth=POSITIONS - 30)).tokens) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": torch.float16}, "dtype='torch.float16': .*bfloat16 or float32"),
        ({"weight_format": "bf16"}, "weight_format='bf16': 'float', as dtype, 'int8' or 'int4'"),
        ({"threads": 0}, "threads=0: must be at least 1"),
        ({"threads": 2, "cpus": (0,)}, r"cpus=\(0,\): one for each of 2 threads"),
    ],
)
def test_wrong_arguments(checkpoint: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        any_way(checkpoint, SIZES, **changed)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("slots", 0, "slots=0: must be at least 1"),
        ("window", 40, "window=40: must be a multiple of 16"),
        ("candidates", 17, "candidates=17: at most 16"),
    ],
)
def test_wrong_sizes(field: str, value: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftSizes(**{"slots": 1, "max_model_len": 10, field: value})


@pytest.mark.parametrize("rounded", ["int8", "int4"])
def test_rounded_weights_need_the_library(
    checkpoint: Path, rounded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    reason = f"weight_format='{rounded}': needs the native backend: .*lib"
    with pytest.raises(ConfigError, match=reason):
        any_way(checkpoint, SIZES, weight_format=rounded)


def test_the_format_of_no_wishes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert best_format(checkpoint, torch.float32) == "float"
    if native.load() is not None:
        assert best_format(checkpoint, torch.bfloat16) == "int8"
    monkeypatch.setattr(native, "load", lambda: None)
    assert best_format(checkpoint, torch.bfloat16) == "bf16"
    with pytest.raises(ConfigError, match="dtype='torch.float16'"):
        best_format(checkpoint, torch.float16)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="config.json"):
        any_way(tmp_path, SIZES)


def test_too_little_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before, or found out while loading: how many bytes it takes is told."""
    model = any_way(checkpoint, SIZES)
    kv = model.kv_layout.cache.data.nbytes
    weights = sum(p.numel() * 4 for p in _plain_model(checkpoint).parameters())
    needed = f"{weights} bytes of weights, {kv} bytes of KV cache for {SLOTS} sequences"
    monkeypatch.setattr(draft_model, "usable_memory_bytes", lambda: weights + kv - 1)
    with pytest.raises(ModelLoadError, match=f"needs {needed}.*; {weights + kv - 1} bytes are"):
        any_way(checkpoint, SIZES)
    monkeypatch.setattr(draft_model, "usable_memory_bytes", lambda: weights + kv)
    any_way(checkpoint, SIZES)

    errors: list[Exception] = [MemoryError(), RuntimeError("can't allocate memory: 9 bytes")]

    def fails(*_: Any, **__: Any) -> None:
        raise errors[0]

    monkeypatch.setattr(draft_model, "load_model", fails)
    while errors:
        with pytest.raises(ModelLoadError, match=f"out of memory: {needed}"):
            any_way(checkpoint, SIZES)
        errors.pop(0)
    errors.append(RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        any_way(checkpoint, SIZES)


def _plain_model(folder: Path) -> Any:
    config = load_model_config(folder)
    return load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)


def test_random_weights(checkpoint: Path) -> None:
    model = any_way(checkpoint, SIZES, load_format="dummy")
    model.kv_layout.open(0, numbers([1]))
    assert run_pending(model)[0].tokens.shape == (1, SIZES.candidates)


@pytest.mark.parametrize("stored", ["int4", "ifq", "Q8_0"])
def test_checkpoints_of_integers_keep_them(
    checkpoint: Path, tmp_path: Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever draft_weight_dtype says: int4 and int8 of compressed-tensors, blocks of GGUF."""
    if native.load() is None:
        pytest.skip("needs the compiled library")
    if stored == "Q8_0":
        changes = {"intermediate_size": 64, "max_position_embeddings": POSITIONS}
        path = make_tiny_gguf(tmp_path, "llama", changes=changes, vocab_size=VOCAB).path
    else:
        path = tmp_path / "out"
        write_quantized(checkpoint, path, cast(OnlineName, stored), device="cpu")

    def log_probs(**other: Any) -> np.ndarray:
        model = any_way(path, replace(SIZES, candidates=16), **other)
        texts = [tokens_of(seed, 40) for seed in range(SLOTS)]
        for slot, text in enumerate(texts):
            model.kv_layout.open(slot, numbers(text))
        scores = np.full((SLOTS, VOCAB), np.nan)
        for found in run_pending(model):
            scores[found.ready[:, None], found.tokens] = found.log_probs
        return scores

    kept = log_probs(weight_format="int4")
    monkeypatch.setattr(native, "load", lambda: None)
    error = np.abs(kept - log_probs())  # torch: the integers' numbers, in float32
    assert np.isfinite(error).mean() > 0.8 * 16 / VOCAB, "other candidates"
    assert 0 < np.nanmean(error) < 0.02, np.nanmean(error)


def test_pickled_weights(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ModelLoadError, match="--allow-pickle-weights"):
        any_way(folder, SIZES)
    found = []
    for model in (any_way(folder, SIZES, allow_pickle=True), any_way(checkpoint, SIZES)):
        model.kv_layout.open(0, numbers([1]))
        found.append(run_pending(model)[0].tokens)
    assert np.array_equal(*found)


def test_ties_and_scores_that_are_none() -> None:
    inf, nan = np.inf, np.nan
    scores = np.array(
        [[-3, -1, -2, -1, -2], [-inf, -1, -inf, -inf, -inf], [nan, nan, nan, nan, nan]], np.float32
    )
    tokens, best = np.zeros((3, 3), np.int32), np.zeros((3, 3), np.float32)
    likeliest(scores, tokens, best)
    assert tokens.tolist() == [[1, 3, 2], [1, -1, -1], [-1, -1, -1]]
    assert best.tolist() == [[-1, -1, -2], [-1, -inf, -inf], [-inf, -inf, -inf]]


def real_candidates(model: DraftModel, prompts: np.ndarray) -> list[np.ndarray]:
    """The best candidate after each prompt's end and after 20 more tokens of it, as branches."""
    best = []
    for slot, prompt in enumerate(prompts):
        model.kv_layout.open(slot, prompt[:-20].astype(np.int32))
    chosen = {}
    for found in run_pending(model):
        chosen.update(zip(found.ready.tolist(), found.tokens[:, 0].tolist(), strict=True))
    chain = np.arange(20, dtype=np.int32)
    for slot, prompt in enumerate(prompts):
        bits = (np.uint64(2) << chain.astype(np.uint64)) - np.uint64(1)
        nodes = TreeNodes(
            numbers([slot]), numbers([20]), prompt[-20:].astype(np.int32), chain + 1, chain, bits
        )  # fmt: skip
        found = model.step(NO_TRUNK, nodes)
        best.append(np.array([chosen[slot], *found.tokens[:, 0]]))
    return best


def test_the_demo_draft_agrees_with_transformers() -> None:
    prompts = heldout_prompts().prompts[:4, :140].astype(np.int64)
    folder = demo_folder("demo-draft")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference.eval()(torch.from_numpy(prompts)).logits[:, -21:].argmax(-1)
    sizes = DraftSizes(4, 2048)
    best = np.stack(real_candidates(any_way(folder, sizes), prompts))
    assert best.tolist() == expected.tolist()
    ways = [(torch.bfloat16, "bf16"), (torch.bfloat16, "int8"), (torch.float32, "int8")]
    for dtype, weight_format in (*ways, (torch.bfloat16, "int4")):
        if weight_format in ("int8", "int4") and native.load() is None:
            continue
        model = any_way(folder, sizes, dtype=dtype, weight_format=weight_format)
        best = np.stack(real_candidates(model, prompts))
        agreed = 0.7 if weight_format == "int4" else 0.9
        assert (best == expected.numpy()).mean() > agreed, weight_format


class Sent:
    """Paths of a tree pool's nodes, from what it tells."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], tuple[int, int]] = {}  # (slot, id): parent, token

    def receive(self, pool: TreePool) -> None:
        sent = pool.unsent()
        owners = np.repeat(sent.slots, sent.counts).tolist()
        for slot, (node, parent, token, _) in zip(owners, sent.nodes.tolist(), strict=True):
            self._nodes[slot, node] = parent, token

    def text_to(self, slot: int, node: int, text: list[int]) -> list[int]:
        """Up to the node, which is a descendant of a token of this text."""
        path: list[int] = []
        while node > 0:
            node, token = self._nodes[slot, node]
            path.insert(0, token)
        return [*text[:-node], *path]


@pytest.mark.parametrize("window", [2048, 64])
def test_a_tree_pool_grows_by_it(load: Load, window: int) -> None:
    """What the tree pool has run says what the model says of that text, as far as it is all
    seen."""
    folder = demo_folder("demo-draft")
    sizes = DraftSizes(3, 2048, window=window, most_rows=128, candidates=4)
    model = load(folder, sizes)
    pool = TreePool(
        3, max_depth=6, max_positions=model.max_positions, vocab_size=model.vocab_size,
        stats=BucketStats(),
    )  # fmt: skip
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = heldout_prompts().prompts[:3].astype(np.int32)
    texts = [prompts[slot, : 40 + 20 * slot].tolist() for slot in range(3)]
    sent = Sent()
    for slot, text in enumerate(texts):
        model.kv_layout.open(slot, numbers(text))
        pool.open(slot, len(text), noisy=False)
    right = rows = kept = 0
    for turn in range(24):
        chosen = pool.choose(np.arange(3, 12) / 3.0)
        found = model.step(model.kv_layout.plan_prefix(64), chosen.nodes)
        best = found.tokens[:, 0].tolist()
        paths = [texts[slot] for slot in found.ready]
        for slot, node in zip(chosen.owners.tolist(), chosen.ids.tolist(), strict=True):
            paths.append(sent.text_to(slot, node, texts[slot]))
        for path, token in zip(paths, best, strict=True):
            with torch.inference_mode():
                logits = reference(torch.tensor([path])).logits[0, -1]
            right += token == int(logits.argmax())
            rows += 1
        pool.expand(found.ready, chosen, found.tokens, found.log_probs)
        sent.receive(pool)
        if turn % 3 == 2:  # the texts go on as they really do
            slots = np.arange(3, dtype=np.int32)
            lengths = numbers([len(text) for text in texts])
            new = [prompts[slot, len(text) : len(text) + 3] for slot, text in enumerate(texts)]
            for slot in range(3):
                model.kv_layout.append(slot, new[slot])
                texts[slot] += new[slot].tolist()
            moves = pool.commit(slots, lengths, np.concatenate(new), numbers([3] * 3))
            model.kv_layout.keep(slots, moves)
            kept += len(moves.sources)
            assert [model.kv_layout.pending(slot) == 0 for slot in range(3)] == moves.ready.tolist()
    assert rows > 60 and kept > 5
    assert right == rows if window == 2048 else right > 0.8 * rows, (right, rows)
