"""The native executor against the torch path: the same tokens and log-probabilities, whatever the
scheduler, the sampling fields or a drafter ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm import LLM, RequestOutput, SamplingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.draft_tree import DraftBatch, DraftTree, join_trees
from hetero_llm.core.drafter import StepReport
from hetero_llm.core.request import Request, Sequence
from hetero_llm.cpu import model_runner, native
from hetero_llm.cpu.executor import unsupported_reason
from hetero_llm.cpu.model_runner import NativeModelRunner
from hetero_llm.engine import factory
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.models import loader
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.model_runner import TorchModelRunner
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint

TOLERANCE = 1e-4
FAMILIES = [
    ("llama", "gqa"),
    ("llama", "tied"),
    ("llama", "llama3"),
    ("mistral", "window"),
    ("qwen2", "full"),
    ("qwen2", "layer_types"),
    ("qwen3", "window_mix"),
    ("qwen3", "tied_biases"),
    ("mixtral", "three_of_seven"),
    ("mixtral", "window_tied"),
    ("qwen2_moe", "renormalized"),
    ("qwen2_moe", "dense_first"),
    ("qwen3_moe", "full"),
    ("qwen3_moe", "every_second"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.1, seed=7)
WITH_LOGPROBS = dataclasses.replace(GREEDY, logprobs=4, prompt_logprobs=3)

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled library")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch, whose own would get in the executor's way on a small machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(folder: Path, backend: str = "native", **engine_args: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 8,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 64,
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
        "cpu_backend": backend,
    }
    return LLM(str(folder), device="cpu", **{**defaults, **engine_args})


def runner_of(llm: LLM) -> Any:
    return llm.engine.runner


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths or (20, 1, 9, 33)]


def generate(llm: LLM, params: Any, *lengths: int) -> list[RequestOutput]:
    return llm.generate(prompt_token_ids=prompts(*lengths), sampling_params=params, use_tqdm=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def both(folder: Path, params: Any, **engine_args: Any) -> tuple[list[RequestOutput], ...]:
    results = []
    for backend, kind in (("native", NativeModelRunner), ("torch", TorchModelRunner)):
        with start(folder, backend, **engine_args) as llm:
            assert isinstance(runner_of(llm), kind)
            results.append(generate(llm, params))
    return tuple(results)


def check_logprobs(ours: Any, others: Any, tolerance: float = TOLERANCE) -> None:
    """Lists of {token: Logprob} or None; those that only one side lists are near the edge."""
    assert len(ours) == len(others)
    for mine, other in zip(ours, others):
        if other is None:
            assert mine is None
            continue
        shared = mine.keys() & other.keys()
        assert len(shared) >= len(other) - 1
        for token in shared:
            assert mine[token].logprob == pytest.approx(other[token].logprob, abs=tolerance)


@pytest.fixture(scope="module", params=FAMILIES, ids="-".join)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", *request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@pytest.fixture(scope="module")
def served(llama: Path) -> Iterator[tuple[LLM, LLM]]:
    """One checkpoint by the executor and by torch."""
    with start(llama) as ours, start(llama, "torch") as other:
        yield ours, other


# -- families ------------------------------------------------------------------------------


def test_every_family_in_float32(family: Path) -> None:
    """Chunked prompts, several sequences, log-probabilities of all that is fed and sampled."""
    params = [WITH_LOGPROBS, GREEDY, dataclasses.replace(WITH_LOGPROBS, logprobs=0), GREEDY]
    ours, others = both(family, params, max_num_batched_tokens=16)
    assert tokens_of(ours) == tokens_of(others)
    for mine, other in zip(ours, others):
        check_logprobs(mine.prompt_logprobs or [], other.prompt_logprobs or [])
        check_logprobs(mine.outputs[0].logprobs or [], other.outputs[0].logprobs or [])


def test_every_family_in_bfloat16(family: Path) -> None:
    """Both round in different places, so that only the prompt's rows can be compared."""
    params = dataclasses.replace(WITH_LOGPROBS, max_tokens=1, prompt_logprobs=VOCAB_SIZE)
    kept = {"dtype": "bfloat16", "max_logprobs": -1}
    exact = both(family, params, max_logprobs=-1)[1]
    ours, others = both(family, params, **kept)
    errors = []
    for outputs in (ours, others):
        for output, reference in zip(outputs, exact):
            for mine, right in zip(output.prompt_logprobs[1:], reference.prompt_logprobs[1:]):
                errors.append([mine[t].logprob - right[t].logprob for t in right])
    halves = np.split(np.abs(np.array(errors)), 2)
    assert halves[0].mean() <= 1.1 * halves[1].mean() + 1e-3, "less exact than torch"


@pytest.mark.parametrize("level", range(len(native.ISA_NAMES)))
def test_every_instruction_set(
    llama: Path, served: tuple[LLM, LLM], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level > int(native.load().hetero_isa_best()):  # type: ignore[union-attr]
        pytest.skip("this machine has less")
    monkeypatch.setenv("HETERO_LLM_CPU_ISA", native.ISA_NAMES[level])
    with start(llama) as llm:
        assert tokens_of(generate(llm, GREEDY)) == tokens_of(generate(served[1], GREEDY))


# -- what requests can ask for ---------------------------------------------------------------


def no_even_tokens(prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
    logits[::2] = -torch.inf
    return logits


REQUESTS = {
    "greedy": GREEDY,
    "seeded": SAMPLED,
    "large seed": dataclasses.replace(SAMPLED, seed=2**64 - 1),
    "thresholds": dataclasses.replace(SAMPLED, top_k=20, top_p=0.8, min_p=0.01),
    "forked": dataclasses.replace(SAMPLED, n=3),
    "best of": dataclasses.replace(SAMPLED, n=2, best_of=4),
    "beams": dataclasses.replace(GREEDY, use_beam_search=True, n=2, best_of=3),
    "penalties": dataclasses.replace(
        SAMPLED, presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.3
    ),
    "bias": dataclasses.replace(GREEDY, logit_bias={5: 4.0, 6: -4.0}),
    "min tokens": dataclasses.replace(GREEDY, ignore_eos=False, min_tokens=5),
    "processor": dataclasses.replace(SAMPLED, logits_processors=[no_even_tokens]),
    "logprobs": dataclasses.replace(SAMPLED, logprobs=5),
    "prompt logprobs": dataclasses.replace(SAMPLED, prompt_logprobs=2, n=2),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field(served: tuple[LLM, LLM], name: str) -> None:
    ours, others = (generate(llm, REQUESTS[name]) for llm in served)
    assert tokens_of(ours) == tokens_of(others)
    for mine, other in zip(ours, others):
        check_logprobs(mine.prompt_logprobs or [], other.prompt_logprobs or [])
        for one, its in zip(mine.outputs, other.outputs):
            assert one.finish_reason == its.finish_reason
            check_logprobs(one.logprobs or [], its.logprobs or [])


def test_mixed_requests_in_one_batch(served: tuple[LLM, LLM]) -> None:
    """Draws of the library and of the torch sampler take turns as requests come and go."""
    kinds = [REQUESTS[name] for name in ("greedy", "seeded", "penalties", "forked")]
    params = [dataclasses.replace(p, max_tokens=3 + 4 * i) for i, p in enumerate(kinds)]
    ours, others = (tokens_of(generate(llm, params)) for llm in served)
    assert ours == others


def test_prefix_hits_change_nothing(llama: Path) -> None:
    with start(llama, num_gpu_blocks_override=40) as llm:
        first = tokens_of(generate(llm, SAMPLED, 40, 33))
        hits = llm.engine.metrics()["prefix_cache_hits"]
        assert tokens_of(generate(llm, SAMPLED, 40, 33)) == first
        assert llm.engine.metrics()["prefix_cache_hits"] > hits


def test_little_memory_changes_nothing(llama: Path, served: tuple[LLM, LLM]) -> None:
    """Preempted requests are computed again."""
    with start(llama, num_gpu_blocks_override=9, enable_prefix_caching=False) as llm:
        lengths = (20, 21, 22, 23)
        ours = tokens_of(generate(llm, SAMPLED, *lengths))
        assert llm.engine.metrics()["num_preemptions"] > 0
    assert ours == tokens_of(generate(served[1], SAMPLED, *lengths))


def test_prompt_logprobs_in_pieces(
    served: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of at most 5 prompt rows at once, cut anywhere, beside requests without any."""
    monkeypatch.setattr(model_runner, "PROMPT_LOGPROB_TOKENS", 5)
    params = [dataclasses.replace(SAMPLED, prompt_logprobs=k) for k in (0, None, 2, 3)]
    params[3] = dataclasses.replace(params[3], n=2)
    for llm in served:
        llm.reset_prefix_cache()
    ours, others = (generate(llm, params, 20, 7, 6, 33) for llm in served)
    assert tokens_of(ours) == tokens_of(others)
    for mine, other in zip(ours, others):
        check_logprobs(mine.prompt_logprobs or [], other.prompt_logprobs or [])


@pytest.mark.parametrize(("weights", "most"), [("int8", 0.2), ("int4", 0.5)])
def test_rounded_weights(llama: Path, served: tuple[LLM, LLM], weights: str, most: float) -> None:
    """Close to the float weights, and not the same."""
    params = dataclasses.replace(WITH_LOGPROBS, max_tokens=1)
    errors: list[float] = []
    with start(llama, cpu_weight_dtype=weights, cpu_threads=1) as llm:
        for mine, other in zip(generate(llm, params), generate(served[1], params)):
            for row, its in zip(mine.prompt_logprobs[1:], other.prompt_logprobs[1:]):
                errors += [row[t].logprob - its[t].logprob for t in row.keys() & its.keys()]
    assert 1e-3 < np.abs(errors).mean() < most


# -- drafts ------------------------------------------------------------------------------------


class TreeDrafter:
    """Random trees along recorded outputs: each node's token is right with probability `right`."""

    idle = False

    def __init__(self, record: dict[tuple[tuple[int, ...], int], list[int]], right: float) -> None:
        self._record = record
        self._right = right
        self._rng = np.random.default_rng(3)
        self.num_nodes = 0

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        return join_trees(map(self._tree, sequences, limits))

    def close(self, request: Request) -> None:
        pass

    def observe_step(self, report: StepReport) -> None:
        pass

    def run_deferred(self) -> None:
        pass

    def _tree(self, sequence: Sequence, limit: int) -> DraftTree | None:
        rng = self._rng
        key = tuple(sequence.token_ids[: sequence.num_prompt_tokens]), sequence.index
        coming = self._record[key][len(sequence.token_ids) - sequence.num_prompt_tokens :]
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for node in range(rng.integers(0, min(limit, 9) + 1)):
            parent = node - 1 if rng.random() < 0.6 else int(rng.integers(-1, node))
            depth = 0 if parent < 0 else depths[parent] + 1
            true = coming[depth] if depth < len(coming) else 0
            tokens.append(true if rng.random() < self._right else (true + 1) % VOCAB_SIZE)
            parents.append(parent)
            depths.append(depth)
        self.num_nodes += len(tokens)
        if rng.random() < 0.1:
            return None
        return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


class ChainDrafter(TreeDrafter):
    """Chains of the next `nodes` tokens, the last one wrong."""

    def _tree(self, sequence: Sequence, limit: int) -> DraftTree:
        key = tuple(sequence.token_ids[: sequence.num_prompt_tokens]), sequence.index
        done = len(sequence.token_ids) - sequence.num_prompt_tokens
        tokens = self._record[key][done : done + min(limit, 4)]
        if len(tokens) > 3:
            tokens[-1] = (tokens[-1] + 1) % VOCAB_SIZE
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        self.num_nodes += len(tokens)
        return DraftTree(np.array(tokens, np.int32), parents)


def serve(engine: Engine, params: SamplingParams) -> dict[tuple[tuple[int, ...], int], list[int]]:
    found = {}
    for index, prompt in enumerate(prompts(20, 3, 9, 25)):
        engine.add_request(engine.make_request(str(index), Prompt(None, prompt), params))
    while engine.has_unfinished:
        for output in engine.step():
            for completion in output.outputs:
                key = tuple(output.prompt_token_ids), completion.index
                found[key] = list(completion.token_ids)
    return found


@pytest.mark.parametrize(
    "params",
    [GREEDY, SAMPLED, dataclasses.replace(SAMPLED, n=2), REQUESTS["thresholds"]],
    ids=["greedy", "seeded", "forked", "thresholds"],
)
@pytest.mark.parametrize("drafter", [ChainDrafter, partial(TreeDrafter, right=0.7)])
def test_drafts_change_no_token(llama: Path, params: SamplingParams, drafter: Any) -> None:
    params = dataclasses.replace(params, max_tokens=24)
    given = {
        "model": str(llama),
        "device": "cpu",
        "dtype": "float32",
        "block_size": 8,
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 96,
        "disable_log_stats": True,
    }
    config = EngineConfig.from_args(resolve_engine_args(given))
    build = partial(factory.build_engine, config, show_progress=False)
    plain = serve(build().engine, params)
    guess = drafter(plain) if drafter is not ChainDrafter else ChainDrafter(plain, right=1.0)
    engine = build(drafter=guess).engine
    assert serve(engine, params) == plain
    metrics = engine.metrics()
    assert 0 < metrics["spec_decode_num_accepted_tokens"] < guess.num_nodes
    assert metrics["num_steps"] < 4 + 24


# -- what the executor leaves to torch -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variant", "dtype", "reason"),
    [
        ("opt", "pre_norm", torch.float32, "OPTForCausalLM is not one of its families"),
        ("phimoe", "bare", torch.float32, "PhimoeForCausalLM has norms of its own"),
        ("llama", "gqa", torch.float16, "float16 is not one of its types"),
        ("llama", "wide_heads", torch.float32, "heads of 12 are no multiple of 8"),
        ("llama", "biases", torch.float32, "it has no biases in the MLP"),
    ],
)
def test_reasons(tmp_path: Path, name: str, variant: str, dtype: torch.dtype, reason: str) -> None:
    config = load_model_config(make_tiny_checkpoint(tmp_path / "model", name, variant))
    assert unsupported_reason(config, dtype) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attn_softcap": 50.0}, "it has no soft cap of attention scores"),
        ({"alibi_slopes": (0.5,) * 4}, "it has no ALiBi"),
    ],
)
def test_scores_that_change_are_left_to_torch(
    llama: Path, change: dict[str, Any], reason: str
) -> None:
    config = dataclasses.replace(load_model_config(llama), **change)
    assert unsupported_reason(config, torch.float32) == reason


def test_activations(llama: Path) -> None:
    config = load_model_config(llama)
    relu = dataclasses.replace(config, hidden_act="relu")
    assert unsupported_reason(relu, torch.float32) == "relu is not one of its activations"
    for name in ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh"):
        known = dataclasses.replace(config, hidden_act=name)
        assert unsupported_reason(known, torch.bfloat16) is None


def test_the_models_own_tensors_are_given_up(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory does not double, and nothing runs through torch unnoticed."""
    models: list[Any] = []
    load_model = loader.load_model

    def load(*args: Any, **kwargs: Any) -> Any:
        models.append(load_model(*args, **kwargs))
        return models[-1]

    monkeypatch.setattr(loader, "load_model", load)
    start(llama).close()
    assert all(parameter.numel() == 0 for parameter in models[0].parameters())
