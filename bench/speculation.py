"""Speculation against our own run without, on held-out text, greedy unless a temperature is given.

One engine serves all arms in turn; each run has a new drafter, which has seen no prompt of the run
and nothing that followed one. "warm": the hybrid cache holds other held-out text, of files that no
prompt is from. What a drafter keeps from one run to the next are the times of steps, as in an
engine that has served for a while.

"draft" arms need --draft: the draft model's worker on the CPU, alone or beside the cache. One
worker serves all of them; it is told of every request anew. "gpu draft" needs --gpu-draft, too: the
engine is then built with the same draft model beside the target, on its device, whatever the arm.

Batches of less than 8 run several times, each time with other prompts.

"tok/s": tokens behind the first one over the time they take, T(N + 1 tokens) - T(1 token), prompts
computed anew each time; the median of the repeats, in which arms alternate. A batch ends with its
slowest sequence, so "first half" has the rate until half of the tokens are there, over the same of
the run without drafts. "no loops" leaves out prompts whose plain output repeats a span of 32
tokens, which any such drafter finds; "random" has prompts of random tokens, where there is nothing
to find. "same": share of requests whose tokens are those of the plain run; in bfloat16 a verify
step's sums may differ from a decode step's in the last bits.
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.common import print_table, write_results
from hetero_llm import SamplingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.drafter import Drafter, PromptObserver
from hetero_llm.core.request import Request, Sequence
from hetero_llm.demo_models import ALIASES, demo_folder, heldout_prompts
from hetero_llm.engine.build_draft_worker import DraftModel, prepare_draft_model
from hetero_llm.engine.build_drafter import make_drafter
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.factory import build_engine
from hetero_llm.engine.input_processor import parse_prompts
from hetero_llm.kv_cache.prefix_cache import root_key
from hetero_llm.models.read_config import load_model_config
from hetero_llm.spec_decode.budget import StepCosts
from hetero_llm.spec_decode.draft_model.on_device import ChainDrafter
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.lookahead.sequence_state import namespace_salt

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
    """How many batches of a size run one after the other: small ones depend on their prompts."""
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


def random_batch(size: int, length: int) -> list[list[int]]:
    return np.random.default_rng(1).integers(3, VOCAB, (size, length)).tolist()


def repeats(tokens: list[int]) -> bool:
    """Whether a span of `SPAN` tokens occurs twice."""
    spans = [tuple(tokens[i : i + SPAN]) for i in range(len(tokens) - SPAN + 1)]
    return len(set(spans)) < len(spans)


class SwitchedDrafter:
    """Drafts with `inner`, which may be exchanged between runs; idle without one."""

    inner: Drafter | None = None
    profile: list[tuple[int, float]] | None = None

    def set_step_times(self, profile: list[tuple[int, float]]) -> None:
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

    def close(self, request: Request) -> None:
        if self.inner is not None:
            self.inner.close(request)

    def observe_step(self, num_rows: int, seconds: float) -> None:
        if self.inner is not None:
            self.inner.observe_step(num_rows, seconds)

    def run_deferred(self) -> None:
        if self.inner is not None:
            self.inner.run_deferred()


class Bench:
    """One engine for all arms."""

    def __init__(self, args: argparse.Namespace, *, gpu_draft: bool = False) -> None:
        self._given = {
            "model": args.model, "device": args.device, "dtype": args.dtype,
            "max_num_seqs": max(args.batches),
            "max_model_len": args.prompt + args.tokens + 16,
        }  # fmt: skip
        self._tokens, self._temperature = args.tokens, args.temperature
        self._sizes = args.batches
        self._switch = SwitchedDrafter()
        config = EngineConfig.from_args(resolve_engine_args(self._given))
        self.draft, config = self._start_draft(args, config)
        self._chains: ChainDrafter | None = None
        self.engine = self._build(args, config, gpu_draft=gpu_draft)
        folder = demo_folder(args.model) if args.model in ALIASES else Path(args.model)
        self._model = load_model_config(folder)
        self._known: dict[str, tuple[StepCosts, float]] = {}
        self._runs = 0
        self.told: dict[str, float] = {}  # by the draft source of the last run

    def _start_draft(
        self, args: argparse.Namespace, config: EngineConfig
    ) -> tuple[DraftModel | None, EngineConfig]:
        """The draft model's worker, and the configuration with the threads that it leaves."""
        if args.draft is None:
            return None, config
        self._draft_args = {
            "speculative_model": args.draft, "num_speculative_tokens": args.draft_tokens,
            "cpu_draft_worker": True, "speculative_overlap": args.overlap,
            "draft_threads": args.draft_threads, "draft_weight_dtype": args.draft_weights,
        }  # fmt: skip
        wanted = EngineConfig.from_args(resolve_engine_args({**self._given, **self._draft_args}))
        config = replace(config, speculation=wanted.speculation)
        folder = demo_folder(args.model) if args.model in ALIASES else Path(args.model)
        config, draft = prepare_draft_model(
            config, load_model_config(folder), None, target_on_cpu=args.device == "cpu",
            max_model_len=self._given["max_model_len"],
        )  # fmt: skip
        assert draft is not None
        draft.worker.wait_ready()
        return draft, replace(config, speculation=None)

    def _build(self, args: argparse.Namespace, config: EngineConfig, *, gpu_draft: bool) -> Engine:
        """The engine; a draft model on the device takes its turn as a drafter among the others."""
        if not gpu_draft:
            return build_engine(config, show_progress=False, drafter=self._switch).engine
        on_device = {
            "speculative_model": args.draft, "num_speculative_tokens": args.draft_tokens,
        }  # fmt: skip
        wanted = EngineConfig.from_args(resolve_engine_args({**self._given, **on_device}))
        config = replace(config, speculation=wanted.speculation)
        engine = build_engine(config, show_progress=False).engine
        scheduler = engine._scheduler
        assert isinstance(scheduler._drafter, ChainDrafter)
        self._chains, scheduler._drafter = scheduler._drafter, self._switch
        profile = getattr(engine._runner, "profile", None)
        if profile:
            self._switch.set_step_times(profile)
        return engine

    def close(self) -> None:
        """Ends the worker."""
        if self.draft is not None:
            self.draft.worker.close()

    @property
    def profile(self) -> list[tuple[int, float]]:
        """Rows and seconds of captured steps as measured at start; none on a CPU."""
        return self._switch.profile or []

    def use(self, arm: str) -> None:
        """A new drafter for an arm, which knows the times of steps from the one before."""
        self._remember()
        self._switch.inner = None
        settings = ARMS[arm]
        if settings is None:
            return
        if arm == GPU_DRAFT:
            if self._chains is None:
                raise SystemExit(f"arm {arm!r} needs --draft and --gpu-draft")
            self._chains.reset_prefix_cache()
            self._switch.inner = self._chains
            return
        source = None
        if settings.get("draft") or settings.get("method") == "draft_model":
            if self.draft is None:
                raise SystemExit(f"arm {arm!r} needs --draft")
            settings = {key: value for key, value in settings.items() if key != "draft"}
            source = self.draft.source()
        given = {**self._given, "speculative_config": settings}
        if settings["method"] == "draft_model":
            given = {**self._given, **self._draft_args}
        speculation = EngineConfig.from_args(resolve_engine_args(given)).speculation
        drafter, _ = make_drafter(
            speculation, self._model, self._given["max_model_len"], source=source
        )
        if isinstance(drafter, HybridDrafter):
            if self._switch.profile:
                drafter.set_step_times(self._switch.profile)
            drafter.costs, drafter._turn = self._known.get(arm, (drafter.costs, 0.0))
            self._known[arm] = drafter.costs, drafter._turn
            if arm == "warm":
                for tick, text in enumerate(other_text(self._sizes)):
                    drafter.global_cache.add(text, 0, namespace_salt(root_key()), tick)
        self._switch.inner = drafter

    def _remember(self) -> None:
        inner = self._switch.inner
        if isinstance(inner, HybridDrafter):
            for arm, (costs, _) in self._known.items():
                if costs is inner.costs:
                    self._known[arm] = costs, inner._turn

    def run(
        self, arm: str, batches: list[list[list[int]]]
    ) -> tuple[list[list[int]], dict[str, float]]:
        """The tokens of each prompt, and what the batches yield, one after the other. Every batch
        has a drafter of its own."""
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
            inner = self._switch.inner
            self.told = inner.metrics() if isinstance(inner, HybridDrafter) else {}
            if "draft_first_accepted" in self.told:
                firsts.append(self.told["draft_first_accepted"])
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
            "hits": self.told.get("draft_hits", 0.0),
            "misses": self.told.get("draft_misses", 0.0),
        }

    def _figures(self) -> np.ndarray:
        stats = self.engine._scheduler.stats
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
        engine, stats = self.engine, self.engine._scheduler.stats
        self._runs += 1
        for index, prompt in enumerate(prompts):
            (parsed,) = parse_prompts(None, [prompt])
            params = SamplingParams(
                temperature=self._temperature, seed=index, max_tokens=count, ignore_eos=True,
                detokenize=False,
            )  # fmt: skip
            engine.add_request(engine.make_request(f"{self._runs}-{index}", parsed, params))
        done: dict[str, list[int]] = {}
        enough = stats.generation_tokens + len(prompts) * (count + 1) // 2
        begin, half = time.perf_counter(), 0.0
        while engine.has_unfinished:
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            if half == 0.0 and stats.generation_tokens >= enough:
                half = time.perf_counter() - begin
        seconds = time.perf_counter() - begin
        engine.reset_prefix_cache()
        return [done[f"{self._runs}-{index}"] for index in range(len(prompts))], seconds, half


def measure(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    works = {
        str(size): batches
        for size, batches in zip(args.batches, batches_of(args.batches, args.prompt), strict=True)
    }
    works["random"] = [random_batch(args.random, args.prompt)]
    for arm in args.arms:  # compiles what is compiled at first use, and learns times of steps
        bench.run(arm, [[[5 + i % 90 for i in range(64)]] * 2])
    table: list[dict[str, Any]] = []
    largest, is_calm = str(max(args.batches)), [False]
    for work in [*works, "no loops"]:
        if work == "no loops":
            (batch,) = works[largest][-1:]
            calm = [p for p, c in zip(batch, is_calm[-len(batch) :], strict=True) if c]
            if not calm:
                print("no output is without loops")
                continue
            works[work] = [calm]
        runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in args.arms}
        plain: list[list[int]] = []
        for _ in range(args.repeats):
            for arm in args.arms:
                outputs, figures = bench.run(arm, works[work])
                if arm == "none":
                    plain = outputs
                same = np.mean([a == b for a, b in zip(outputs, plain, strict=True)])
                runs[arm].append({**figures, "same": float(same)})
        if work == largest:
            is_calm = [not repeats(tokens) for tokens in plain]
        table += rows_of(work, len(works[work][-1]), runs)
    return table


def rows_of(work: str, size: int, runs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Rows of the table: medians of each arm's runs."""
    rows: list[dict[str, Any]] = []
    middle = {
        arm: {name: median(run[name] for run in of_arm) for name in of_arm[0]}
        for arm, of_arm in runs.items()
    }
    for arm, figures in middle.items():
        over = {
            "over none": figures["tok/s"] / middle["none"]["tok/s"],
            "first half": figures["half tok/s"] / middle["none"]["half tok/s"],
        }
        rows.append({"work": work, "batch": size, "drafts": arm, **over, **figures})
    print_table(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="the demo target or a scale-up of it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=lambda s: [int(w) for w in s.split(",")], default=[1, 8])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS)[:7])
    parser.add_argument("--prompt", type=int, default=768, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="behind the first")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--random", type=int, default=4, help="random prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draft", help="draft model for the draft arms")
    parser.add_argument(
        "--gpu-draft", action="store_true", help="have --draft on the device of --model, too"
    )
    parser.add_argument("--draft-tokens", type=int, default=6)
    parser.add_argument("--draft-threads", type=int)
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--overlap", default="auto")
    parser.add_argument("--out", help="JSON file")
    parser.add_argument(
        "--no-budget", action="store_true",
        help="verify all that is proposed, whatever it costs: for tokens per step, not for speed",
    )  # fmt: skip
    args = parser.parse_args()
    if args.no_budget:
        StepCosts.observe = lambda *_: None  # type: ignore[method-assign]
        StepCosts.price = lambda *_: None  # type: ignore[method-assign]
    if args.arms[0] != "none":
        parser.error("the first arm is the baseline: none")
    if args.gpu_draft and args.draft is None:
        parser.error("--gpu-draft needs --draft")
    if len(set(args.batches)) < len(args.batches):
        parser.error("batches of one size would be one row")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    bench = Bench(args, gpu_draft=args.gpu_draft)
    profile = [(rows, round(seconds * 1e3, 3)) for rows, seconds in bench.profile]
    print("profile, rows and ms:", *(f"{rows}:{ms}" for rows, ms in profile))
    table = measure(bench, args)
    bench.close()
    settings = {"model": Path(args.model).name, "device": args.device, "dtype": args.dtype,
                "temperature": args.temperature, "prompt": args.prompt, "tokens": args.tokens,
                "repeats": args.repeats,
                "draft": args.draft and Path(args.draft).name, "draft_tokens": args.draft_tokens,
                "overlap": args.overlap,
                "budget": not args.no_budget, "profile_ms": profile}  # fmt: skip
    write_results(f"speculation.{args.device}", {**settings, "rows": table}, args.out)


if __name__ == "__main__":
    main()
