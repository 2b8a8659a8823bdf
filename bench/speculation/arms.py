"""Arms of the speculation benches: drafters by name, and one engine that runs with each in turn.

Each run has a new drafter, which has seen no prompt of the run and nothing that followed one; what
it keeps from one run to the next are the times of steps, as in an engine that has served for a
while.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import numbers
from bench.generation import add_requests, greedy, step_outputs
from hetero_llm import LoRARequest
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.drafter import (
    ArrayDrafter,
    Drafter,
    PromptObserver,
    SteadyStep,
    StepReport,
)
from hetero_llm.core.request import Request, Sequence
from hetero_llm.demo_models import ALIASES, demo_folder, heldout_prompts
from hetero_llm.engine.builders.build_draft_worker import StartingDraftWorker, prepare_draft_model
from hetero_llm.engine.builders.build_drafter import make_drafter
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.factory import build_engine
from hetero_llm.kv_cache.prefix_cache import hash_root
from hetero_llm.models.read_config import load_model_config
from hetero_llm.spec_decode.draft_model.on_device import ChainDrafter
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.lookahead.sequence_state import namespace_salt
from hetero_llm.spec_decode.proposal_account import ProposalAccount
from hetero_llm.utils.gc_control import prompt_wakeups, serve_promptly

LOOKAHEAD = {"method": "lookahead", "cache_size": 4 << 20, "token_paths_top_k": 2}
GPU_DRAFT = "gpu draft"
ARMS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2,
              "prompt_lookup_max": 5},
    "raw": {**LOOKAHEAD, "cache_mode": 0},
    "turbo": {**LOOKAHEAD, "cache_mode": 1},
    "hybrid": {**LOOKAHEAD, "cache_mode": 2},
    "warm": {**LOOKAHEAD, "cache_mode": 2},
    "merged": {**LOOKAHEAD, "cache_mode": 3},
    "draft": {"method": "draft_model"},
    "draft + hybrid": {**LOOKAHEAD, "cache_mode": 2, "draft": True},
    "draft + merged": {**LOOKAHEAD, "cache_mode": 3, "draft": True},
    GPU_DRAFT: {},
}  # fmt: skip
SPAN = 32
FEW = 8
VOCAB = 4096


def num_batches(size: int) -> int:
    """Batches of a size that run one after the other; figures of few prompts depend on them."""
    return max(1, FEW // size)


def batches_of(sizes: list[int], length: int) -> list[list[list[list[int]]]]:
    """The batches of every size, of distinct held-out prompts, their last `length` tokens."""
    rows = iter(heldout_prompts().prompts[_order(), -length:].tolist())
    return [[[next(rows) for _ in range(size)] for _ in range(num_batches(size))] for size in sizes]


def other_text(sizes: list[int]) -> list[np.ndarray]:
    """[1324] tokens each of the held-out files that no batch of these sizes is from."""
    held = heldout_prompts()
    rows = _order()[sum(size * num_batches(size) for size in sizes) :]
    assert len(rows), "every held-out file has a prompt in a batch"
    return [np.concatenate([held.prompts[r], held.continuations[r]]).astype(np.int32) for r in rows]


def _order() -> np.ndarray:
    return np.random.default_rng(0).permutation(len(heldout_prompts().prompts))


def repeats(tokens: list[int], span: int = SPAN) -> bool:
    """Whether a span of `span` tokens occurs twice."""
    spans = [tuple(tokens[i : i + span]) for i in range(len(tokens) - span + 1)]
    return len(set(spans)) < len(spans)


class SwitchedDrafter:
    """Drafts with `inner`, which may be exchanged between runs; idle without one."""

    inner: Drafter | None = None
    profile: list[tuple[int, float]] | None = None

    def set_step_times(self, profile: list[tuple[int, float]], launches_ahead: bool = True) -> None:
        self.profile = profile

    @property
    def idle(self) -> bool:
        return self.inner is None or self.inner.idle

    def prompts_started(self, sequences: list[Sequence]) -> None:
        if isinstance(self.inner, PromptObserver):
            self.inner.prompts_started(sequences)

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        assert self.inner is not None
        return self.inner.propose(sequences, limits, num_rows)

    def rows_of(self, sequences: list[Sequence]) -> np.ndarray | None:
        return self.inner.rows_of(sequences) if isinstance(self.inner, ArrayDrafter) else None

    def propose_next(
        self,
        sequences: list[Sequence],
        numbers: np.ndarray,
        token_ids: np.ndarray,
        sizes: np.ndarray,
        most_nodes: int,
    ) -> SteadyStep | None:
        assert isinstance(self.inner, ArrayDrafter)
        return self.inner.propose_next(sequences, numbers, token_ids, sizes, most_nodes)

    def close(self, request: Request) -> None:
        if self.inner is not None:
            self.inner.close(request)

    def observe_step(self, report: StepReport) -> None:
        if self.inner is not None:
            self.inner.observe_step(report)

    def run_deferred(self) -> None:
        if self.inner is not None:
            self.inner.run_deferred()


def add_arguments(parser: argparse.ArgumentParser, *, batches: bool = True) -> None:
    """The arguments of `Bench` but --model. Benches change defaults with `set_defaults`."""
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    if batches:
        parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="behind the first")
    parser.add_argument("--draft", help="draft model for the draft arms")
    parser.add_argument("--draft-tokens", type=int, default=6)
    parser.add_argument("--draft-threads", type=int)
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--overlap", default="auto")
    parser.set_defaults(temperature=0.0)


class Bench:
    """One engine for all arms, which take turns with drafters of their own.

    Args:
        args: of `add_arguments`, with model, device, dtype and temperature.
        gpu_draft: the engine gets the draft model on its device, too.
        engine_args: further arguments of the engine.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        gpu_draft: bool = False,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._given = {
            "model": args.model, "device": args.device, "dtype": args.dtype,
            "max_num_seqs": max(args.batches),
            "max_model_len": args.prompt + args.tokens + 16, **(engine_args or {}),
        }  # fmt: skip
        self._tokens, self._temperature = args.tokens, args.temperature
        self._sizes = args.batches
        self._adapter: LoRARequest | None = None
        self.switch = SwitchedDrafter()
        folder = demo_folder(args.model) if args.model in ALIASES else Path(args.model)
        self._model = load_model_config(folder)
        config = EngineConfig.from_args(resolve_engine_args(self._given))
        self.draft: StartingDraftWorker | None = None
        if args.draft is not None:
            config = self.start_draft(args, args.draft)
        self._chains: ChainDrafter | None = None
        self.engine = self._build(args, config, gpu_draft=gpu_draft)
        self._known: dict[str, ProposalAccount] = {}
        self._runs = 0
        self.drafter_metrics: dict[str, float] = {}  # of the last run's drafter

    def set_temperature(self, temperature: float) -> None:
        """Of the runs from now on."""
        self._temperature = temperature

    def set_adapter(self, adapter: LoRARequest | None) -> None:
        """Of all requests from now on."""
        self._adapter = adapter

    def start_draft(self, args: argparse.Namespace, folder: str | Path) -> EngineConfig:
        """Starts the worker of a draft model, in the place of the one before. Returns the engine's
        configuration with the threads left for the target."""
        self.close()
        config = EngineConfig.from_args(resolve_engine_args(self._given))
        self._draft_args = {
            "speculative_model": str(folder), "num_speculative_tokens": args.draft_tokens,
            "cpu_draft_worker": True, "speculative_overlap": args.overlap,
            "draft_threads": args.draft_threads, "draft_weight_dtype": args.draft_weights,
        }  # fmt: skip
        wanted = EngineConfig.from_args(resolve_engine_args({**self._given, **self._draft_args}))
        config = replace(config, speculation=wanted.speculation)
        config, self.draft = prepare_draft_model(
            config, self._model, None, target_on_cpu=args.device == "cpu",
            max_model_len=self._given["max_model_len"],
        )  # fmt: skip
        assert self.draft is not None
        self.draft.worker.wait_ready()
        return replace(config, speculation=None)

    def _build(self, args: argparse.Namespace, config: EngineConfig, *, gpu_draft: bool) -> Engine:
        """The engine. With `gpu_draft` it has a draft model on the device, whose drafter is used in
        the arm of that name only."""
        serve_promptly()  # as `LLM` does, so that garbage is collected as in serving
        if not gpu_draft:
            return build_engine(config, show_progress=False, drafter=self.switch).engine
        on_device = {
            "speculative_model": args.draft, "num_speculative_tokens": args.draft_tokens,
        }  # fmt: skip
        wanted = EngineConfig.from_args(resolve_engine_args({**self._given, **on_device}))
        config = replace(config, speculation=wanted.speculation)
        engine = build_engine(config, show_progress=False).engine
        scheduler = engine.scheduler
        assert isinstance(scheduler.drafter, ChainDrafter)
        self._chains, scheduler.drafter = scheduler.drafter, self.switch
        profile = getattr(engine.runner, "profile", None)
        if profile:
            self.switch.set_step_times(profile)
        return engine

    def close(self) -> None:
        """Ends the draft worker."""
        if self.draft is not None:
            self.draft.worker.close()

    @property
    def profile_ms(self) -> list[tuple[int, float]]:
        """Rows and milliseconds of captured steps as measured at start; none on a CPU."""
        return [(rows, round(seconds * 1e3, 3)) for rows, seconds in self.switch.profile or []]

    def use(self, arm: str) -> None:
        """Gives the engine a new drafter of an arm, with the step times of the last one."""
        self.switch.inner = None
        settings = ARMS[arm]
        if settings is None:
            return
        if arm == GPU_DRAFT:
            if self._chains is None:
                raise SystemExit(f"arm {arm!r} needs --draft and --gpu-draft")
            self._chains.reset_prefix_cache()
            self.switch.inner = self._chains
            return
        source = None
        if settings.get("draft") or settings.get("method") == "draft_model":
            if self.draft is None:
                raise SystemExit(f"arm {arm!r} needs --draft")
            settings = {key: value for key, value in settings.items() if key != "draft"}
            source = self.draft.proposer()
        given = {**self._given, "speculative_config": settings}
        if settings["method"] == "draft_model":
            given = {**self._given, **self._draft_args}
        speculation = EngineConfig.from_args(resolve_engine_args(given)).speculation
        drafter, _ = make_drafter(
            speculation, self._model, self._given["max_model_len"], proposer=source
        )
        if isinstance(drafter, HybridDrafter):
            if self.switch.profile:
                drafter.set_step_times(self.switch.profile)
            drafter.account = self._known.setdefault(arm, drafter.account)
            if arm == "warm":
                for tick, text in enumerate(other_text(self._sizes)):
                    drafter.global_cache.add(text, 0, namespace_salt(hash_root()), tick)
        self.switch.inner = drafter

    def run(
        self, arm: str, batches: list[list[list[int]]]
    ) -> tuple[list[list[int]], dict[str, float]]:
        """The tokens of each prompt, and figures of all batches, which run one after the other,
        each with a new drafter."""
        outputs: list[list[int]] = []
        taken = until_half = 0.0
        counted = np.zeros(5)
        firsts: list[float] = []
        for prompts in batches:
            self.use(arm)
            _, first, _ = self._generate(prompts, 1)
            self.use(arm)
            before = self._figures()
            found, seconds, half = self._generate(prompts, self._tokens + 1)
            counted += self._figures() - before
            inner = self.switch.inner
            self.drafter_metrics = inner.metrics() if isinstance(inner, HybridDrafter) else {}
            if "draft_first_accepted_rate" in self.drafter_metrics:
                firsts.append(self.drafter_metrics["draft_first_accepted_rate"])
            outputs += found
            taken += seconds - first
            until_half += half - first
        drafted, accepted, steps, drafts, first = counted.tolist()
        generated = len(outputs) * self._tokens
        return outputs, {
            "tok/s": generated / taken,
            "half tok/s": generated / 2 / until_half,
            "tokens/step": generated / max(generated - accepted, 1),
            "drafted/token": drafted / generated,
            "accepted of drafted": accepted / max(drafted, 1),
            "steps": steps,
            "a1": float(np.mean(firsts)) if firsts else first / max(drafts, 1),
            "hits": self.drafter_metrics.get("draft_hits", 0.0),
            "misses": self.drafter_metrics.get("draft_misses", 0.0),
        }

    def _figures(self) -> np.ndarray:
        stats = self.engine.scheduler.stats
        first = stats.accepted_at[0] if stats.accepted_at else 0
        return np.array(
            [stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_steps,
             stats.num_drafts, first]
        )  # fmt: skip

    def _generate(
        self, prompts: list[list[int]], count: int
    ) -> tuple[list[list[int]], float, float]:
        """Tokens of each prompt; seconds until all and until half of those behind the first ones
        are there."""
        engine, stats = self.engine, self.engine.scheduler.stats
        self._runs += 1
        ids = []
        for index, prompt in enumerate(prompts):
            params = greedy(count, temperature=self._temperature, seed=index)
            name = f"{self._runs}-{index}"
            ids += add_requests(engine, name, [prompt], params, adapter=self._adapter)
        done: dict[str, list[int]] = {}
        enough = stats.generation_tokens + len(prompts) * (count + 1) // 2
        begin, half = time.perf_counter(), 0.0
        while engine.has_unfinished:
            with prompt_wakeups():
                done |= step_outputs(engine)
            if half == 0.0 and stats.generation_tokens >= enough:
                half = time.perf_counter() - begin
        seconds = time.perf_counter() - begin
        engine.reset_prefix_cache()
        return [done[request_id] for request_id in ids], seconds, half
