"""What the draft worker's drafts are worth, without running a target: counts, not timings.

    python -m bench.speculation.replay_worker [--temperatures 0 0.7] [--prompts 24] [--overlap auto]

A target's outputs are recorded once (float32, greedy or sampled). Drafts are then made along them,
one output at a time, by the engine's own drafter, tree replica and budget and the worker's own loop
with the demo draft model, over real rings in this process. Only time is simulated: steps of either
side take what `--verify` and `--draft-steps` say (milliseconds by tokens, as measured on the target
machine), the engine's host work `--gap`. So the same command gives the same counts on any machine
of one instruction set.

"a1": how often the likeliest node of a draft was the next token. "misses": proposals for which the
worker had sent nothing yet; "plain": steps without a draft for that reason. "waited": by the engine
for further levels. "rows": tokens that the worker ran. "over none": speed-up in simulated time. "no
loops" leaves out prompts whose output repeats a span of 32 tokens; `--calm` cuts outputs where they
begin to do so. Prompts fall into two halves by their package: settings are to be tuned on "a" and
reported on "b". "bench": the prompts of bench.speculation.speedup at batch 1, with its seed.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import torch

from bench.common import RESULTS, bench_parser, print_table, write_results
from bench.speculation.arms import SPAN, batches_of, repeats
from bench.speculation.replay_drafts import Clock, accepted_depth, halves, record, sequence_of
from hetero_llm.bridge.ipc.messages import MessageKind, Messages, Outbox
from hetero_llm.bridge.ipc.rings import Consumer, Producer, create_ring
from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.drafter import StepReport
from hetero_llm.core.step_times import StepTimes, extend_profile
from hetero_llm.cpu.draft_worker.draft_model import DraftModel, DraftSizes
from hetero_llm.cpu.draft_worker.step_profile import MOST_TOKENS
from hetero_llm.cpu.draft_worker.tree_pool import TreePool
from hetero_llm.cpu.draft_worker.worker import Worker
from hetero_llm.demo_models import demo_folder, heldout_prompts
from hetero_llm.spec_decode.draft_model.node_buckets import BucketStats
from hetero_llm.spec_decode.draft_model.proposer import DraftModelProposer
from hetero_llm.spec_decode.draft_model.worker_client import WorkerCounters
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter

VOCAB, END_ID = 4096, 0
SEES = 512  # tokens of a long text that the draft model looks at, as in an engine
VERIFY = "1:3.60 2:4.03 8:3.99 16:4.02 24:4.08 32:4.10 40:4.39 64:4.48 80:4.56 128:4.87"
DRAFT_STEPS = "1:0.30 2:0.31 4:0.32 8:0.37 16:0.45 32:0.58 64:0.91"
NEWS = 0.2  # of the gap, until tokens are known


class FixedTimes(StepTimes):
    """Steps take what was said, whatever they take here."""

    def observe(self, num_tokens: int, seconds: float, context: float = 0.0) -> None:
        pass


# large: both ends of the rings, the worker, and the clock that it shares with the engine.
class PlayedWorker:
    """Stands in for the worker client: the worker's loop in this process, in simulated time.

    Args:
        model: without any text. times: of its steps. record: what came of earlier nodes.

    Attributes:
        now: seconds. The engine hears of the worker's nodes when its step ends.
        rows, steps, busy: rows of all its steps, their number and seconds.
    """

    def __init__(
        self,
        model: DraftModel,
        times: StepTimes,
        stats: BucketStats,
        *,
        ahead: bool,
        max_depth: int,
        most_nodes: int,
    ) -> None:
        self.now = self._idle_from = 0.0
        self.rows = self.steps = 0
        self.busy = 0.0
        self._is_idle = True
        self.outbox = Outbox()
        self.counters = WorkerCounters(starts=1)
        self.is_up, self.why_off = True, None
        self._model, self._times = model, times
        self._generation = 0
        self._arrived: deque[tuple[float, Messages]] = deque()
        with ExitStack() as stack:
            requests, answers = (stack.enter_context(create_ring()) for _ in range(2))
            self._requests = stack.enter_context(Producer(requests))
            self._answers = stack.enter_context(Consumer(answers, max_messages=1024))
            self._worker = Worker(
                model,
                TreePool(
                    1, max_depth=max_depth, stats=stats, max_positions=model.max_positions,
                    vocab_size=model.vocab_size,
                ),
                times,
                stack.enter_context(Consumer(requests)),
                stack.enter_context(Producer(answers)),
                slots=1, ahead=ahead, most_nodes=most_nodes, clock=lambda: 0.0,
            )  # fmt: skip
            self._worker._trace = []
            self._stack = stack.pop_all()

    def _turn(self) -> bool:
        """One step; False if it has nothing to do until a record arrives."""
        trace = self._worker._trace
        assert trace is not None
        before = len(trace)
        self._worker.run_once(0)
        self._is_idle = len(trace) == before
        if not self._is_idle:
            rows = trace[-1][2]
            self._idle_from += self._times.predict(rows)
            self.busy += self._times.predict(rows)
            self.rows += rows
            self.steps += 1
        while len(records := self._answers.pop().messages):
            self._arrived.append((self._idle_from, records.copy()))
        return not self._is_idle

    def _run(self, until: float) -> None:
        """All steps that begin before that."""
        while not self._is_idle and self._idle_from < until:
            self._turn()

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def push(self) -> None:
        if len(self.outbox):
            self._run(self.now)
            self._requests.push(self.outbox)
            assert not len(self.outbox)
            if self._is_idle:
                self._is_idle, self._idle_from = False, self.now

    def poll(self, timeout_us: int = 0) -> Messages | None:
        limit = self.now + timeout_us * 1e-6
        self._run(self.now)
        while not self._arrived and not self._is_idle and self._idle_from < limit:
            self._turn()
        if not self._arrived or self._arrived[0][0] > limit:
            self.now = limit
            return None
        self.now = max(self.now, self._arrived[0][0])
        come = []
        while self._arrived and self._arrived[0][0] <= self.now:
            come.append(self._arrived.popleft()[1])
        parts = zip(*((records.headers, records.words) for records in come), strict=True)
        found = Messages(*map(np.concatenate, parts))
        found = found.only(found.headers["kind"] != MessageKind.HEARTBEAT)
        return found if len(found) else self.poll(int((limit - self.now) * 1e6))

    def check_health(self) -> None:
        pass

    def close(self) -> None:
        self._stack.close()
        self._model.kv_layout.close(0)


class Player:
    """Drafts along recorded outputs, one at a time. The worker's record of what came of its nodes
    lasts, as its process does; the engine's begins anew with each output, as in
    bench.speculation.speedup."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._width = args, args.prompt + args.tokens + 16
        self._model = DraftModel.load(
            demo_folder("demo-draft"), DraftSizes(1, self._width, window=SEES),
            dtype=torch.float32, weight_format="float", threads=1,
        )  # fmt: skip
        sizes, ms = zip(*_pairs(args.draft_steps), strict=True)
        profile = extend_profile(sizes, [each * 1e-3 for each in ms], [MOST_TOKENS])
        self._times = FixedTimes(*profile)
        self._clock = Clock(_pairs(args.verify), args.gap)
        self._stats = BucketStats()

    def _prepare(self) -> tuple[PlayedWorker, DraftModelProposer, HybridDrafter]:
        args = self._args
        worker = PlayedWorker(
            self._model, self._times, self._stats, ahead=args.overlap != "off",
            max_depth=min(2 * args.draft_tokens + 2, MAX_NODES),
            most_nodes=min(4 * args.draft_tokens, MAX_NODES),
        )  # fmt: skip
        config = DraftModelConfig(
            "demo-draft", None, args.draft_tokens, None, None, "auto", args.overlap, None, False
        )
        source = DraftModelProposer(
            cast(Any, worker), config, slots=1, vocab_size=VOCAB,
            max_positions=self._model.max_positions, clock=lambda: worker.now,
        )  # fmt: skip
        drafter = HybridDrafter(
            LookaheadConfig(eos_token_id=(END_ID,), max_seq_len=self._width, voc_size=VOCAB),
            width=self._width, capacity=0, uses_cache=False, model=source,
        )  # fmt: skip
        drafter.set_step_times(self._clock.profile())
        return worker, source, drafter

    def play(
        self, seed: int, prompt: list[int], output: list[int], temperature: float
    ) -> Counter[str]:
        """Sums of one output."""
        worker, source, drafter = self._prepare()
        clock, gap = self._clock, self._clock.gap
        sequence = sequence_of("replay", prompt, len(output), temperature=temperature, seed=seed)
        drafter.prompts_started([sequence])
        worker.now += self._args.prefill * 1e-3  # the worker runs the prompt, too
        drafter.run_deferred()
        sequence.token_ids.append(output[0])
        begin, sums = worker.now, Counter[str]()
        while (done := len(sequence.token_ids) - len(prompt)) < len(output):
            limit = min(len(output) - done - 1, MAX_NODES)
            tokens: list[int] = []
            parents: list[int] = []
            asks = limit > 0 and not drafter.idle
            if asks:  # else the step was launched before the last one's tokens were known
                worker.now += NEWS * gap
                drafts = drafter.propose([sequence], [limit], 1)
                worker.now += (1 - NEWS) * gap
                tokens, parents = drafts.token_ids.tolist(), drafts.parents.tolist()
            drafter.run_deferred()
            seconds = clock.seconds(1 + len(tokens))
            worker.now += seconds
            drafter.observe_step(StepReport(1, 1 + len(tokens), seconds, 0.0, asks))
            accepted = accepted_depth(tokens, parents, output[done:-1])
            if tokens:
                sums.update(asked=1, firsts=tokens[0] == output[done])
            sums.update(
                drafted=len(tokens), accepted=accepted, steps=1, tokens=accepted + 1,
                plain=asks and not tokens,
            )  # fmt: skip
            sequence.token_ids += output[done : done + accepted + 1]
        metrics = source.metrics()
        seconds = worker.now - begin
        sums.update(rows=worker.rows, misses=int(metrics["draft_misses"]))
        times = {"waited": metrics["draft_wait_seconds"], "busy": worker.busy, "seconds": seconds}
        for name, value in {**times, "none": clock.seconds(1) * sums["tokens"]}.items():
            sums[name] = cast(int, value)
        drafter.close(sequence.request)
        drafter.run_deferred()
        worker.close()
        return sums


def _pairs(text: str) -> list[tuple[int, float]]:
    pairs = (pair.split(":") for pair in text.split())
    return [(int(rows), float(ms)) for rows, ms in pairs]


def figures(sums: list[Counter[str]]) -> dict[str, float]:
    total = {key: sum(one[key] for one in sums) for key in sums[0]}
    steps = total["steps"]
    return {
        "tokens/step": total["tokens"] / steps,
        "a1": total["firsts"] / max(total["asked"], 1),
        "drafted/token": total["drafted"] / total["tokens"],
        "drafted/step": total["drafted"] / steps,
        "accepted of drafted": total["accepted"] / max(total["drafted"], 1),
        "misses": total["misses"] / steps,
        "plain": total["plain"] / steps,
        "rows": total["rows"] / steps,
        "waited ms": total["waited"] / steps * 1e3,
        "worker busy": total["busy"] / total["seconds"],
        "over none": total["none"] / total["seconds"],
    }


def texts_of(
    args: argparse.Namespace, temperature: float
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Seeds, prompts and outputs, recorded if they are not yet."""
    if args.half == "bench":
        batches = batches_of([1], args.prompt)[0]
        prompts = np.array([batch[0] for batch in batches][: args.prompts])
        seeds = [0] * len(prompts)
    else:
        seeds = halves()[args.half][: args.prompts].tolist()
        prompts = heldout_prompts().prompts[seeds, -args.prompt :].astype(np.int64)
    name = (
        f"replay-worker-{temperature:g}-{args.half}-{args.prompts}-{args.prompt}-{args.tokens}.npz"
    )
    path = RESULTS.parents[1] / "build" / name
    return seeds, prompts, record(path, prompts, args.tokens, temperature=temperature, seeds=seeds)


def until_loop(tokens: list[int]) -> list[int]:
    """What comes before a span of `SPAN` tokens occurs for the second time."""
    seen: set[tuple[int, ...]] = set()
    for first in range(len(tokens) - SPAN + 1):
        span = tuple(tokens[first : first + SPAN])
        if span in seen:
            return tokens[:first]
        seen.add(span)
    return tokens


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--half", choices=["a", "b", "bench"], default="b")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=257, help="of an output")
    parser.add_argument("--draft-tokens", type=int, default=6)
    parser.add_argument("--overlap", default="auto")
    parser.add_argument("--gap", type=float, default=0.5, help="ms between steps with drafts")
    parser.add_argument("--prefill", type=float, default=40.0, help="ms of the prompt's step")
    parser.add_argument("--verify", default=VERIFY, help="rows:ms")
    parser.add_argument("--draft-steps", default=DRAFT_STEPS, help="rows:ms")
    parser.add_argument("--calm", action="store_true", help="outputs end where they begin to loop")
    args = parser.parse_args()
    player = Player(args)
    table: list[dict[str, Any]] = []
    for temperature in args.temperatures:
        seeds, prompts, found = texts_of(args, temperature)
        outputs = found.tolist()
        if args.calm:
            outputs = [until_loop(output) for output in outputs]
        sums = [
            player.play(seed, prompt, output, temperature)
            for seed, prompt, output in zip(seeds, prompts.tolist(), outputs, strict=True)
            if len(output) > SPAN
        ]
        loops = [repeats(output) for output in outputs if len(output) > SPAN]
        for kind in ("all", "no loops"):
            kept = [one for one, loop in zip(sums, loops, strict=True) if kind == "all" or not loop]
            if kept:
                table.append(
                    {"temperature": temperature, "prompts": kind, "n": len(kept), **figures(kept)}
                )
    print_table(table)
    if args.out:
        write_results("replay_worker", {**vars(args), "rows": table}, args.out)


if __name__ == "__main__":
    main()
