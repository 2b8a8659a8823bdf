"""Where the host's time between two verify steps goes.

    python -m bench.speculation.host_gap [--model demo] [--arms hybrid ...] [--draft demo-draft]

"gap": microseconds from a step's results to the launch of the next one, if that has drafts; the
device waits meanwhile. It leaves out what an engine that steps asynchronously does after the
launch: deferred work and output. Parts of the gap: "update" takes in the tokens, "schedule" is the
scheduler's own part of the next step, and the drafter's parts have the names of its methods. Parts
of the draft model's proposer: "commit" sends tokens to the worker, "mirror" reads the tree replica,
"wait" waits for the worker. "rest" is what no part counts, reading the clocks included. Medians
over all steps; greedy, held-out prompts, cold cache. bench.speculation.lookahead_gaps measures on
the device.

Other programs on the same cores make every figure larger: --clock thread leaves out the time in
which the thread did not run, and with it all waiting.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.common import bench_parser, report, settings_of
from bench.speculation.arms import ARMS, Bench, add_arguments, batches_of
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.scheduler.scheduler import Scheduler
from hetero_llm.spec_decode.draft_model.proposer import DraftModelProposer
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.lookahead.sequence_state import SequenceStates
from hetero_llm.spec_decode.proposal_step import ProposalStep

_PARTS: list[tuple[type, str, str]] = [
    (Scheduler, "update", "update"),
    (Scheduler, "schedule", "schedule"),
    (Scheduler, "schedule_next", "schedule"),
    (HybridDrafter, "propose", "propose"),
    (HybridDrafter, "propose_next", "propose"),
    (SequenceStates, "follow", "follow"),
    (ProposalStep, "take_in", "catch up"),
    (ProposalStep, "take_in_next", "catch up"),
    (ProposalStep, "look_up", "look up"),
    (ProposalStep, "merge", "merge"),
    (ProposalStep, "choose", "choose"),
    (DraftModelProposer, "commit", "commit"),
    (DraftModelProposer, "propose", "mirror"),
    (DraftModelProposer, "_wait", "wait"),
]
"""Methods and the names of their times."""
_BESIDES: list[tuple[type, str, str]] = [
    (Scheduler, "run_deferred", "besides"),
    (OutputProcessor, "process", "besides"),
]


class GapClock:
    """Microseconds between a runner's results and its next launch, by who spent them."""

    def __init__(self, runner: Any, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._finish, self._launch = runner.finish, runner.launch
        runner.finish, runner.launch = self._finished, self._launched
        self._known = 0.0  # when the last results were; 0 behind a launch
        self._parts: dict[str, float] = defaultdict(float)
        self.gaps: list[dict[str, float]] = []
        for owner, method, name in (*_PARTS, *_BESIDES):
            setattr(owner, method, self._timed(getattr(owner, method), name))

    def _finished(self, pending: Any) -> ModelRunnerOutput:
        output: ModelRunnerOutput = self._finish(pending)
        self._parts = defaultdict(float)
        self._known = self._clock()
        return output

    def _launched(self, step: SchedulerOutput) -> Any:
        now = self._clock()
        if self._known and step.drafts is not None:
            gap = (now - self._known) * 1e6 - self._parts["besides"]
            parts = self._parts
            parts["rest"] = gap - parts["update"] - parts["schedule"]
            parts["schedule"] -= parts["propose"]
            parts["mirror"] -= parts["wait"]
            self.gaps.append({"gap": gap, **parts})
        self._known = 0.0
        return self._launch(step)

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock()
            try:
                return method(*args, **kwargs)
            finally:
                self._parts[name] += (self._clock() - begin) * 1e6

        return timed

    def figures(self) -> dict[str, float]:
        """Medians of what was measured since the last call."""
        gaps, self.gaps = self.gaps, []
        if not gaps:
            return {}
        middle = {
            name: float(np.median([gap.get(name, 0.0) for gap in gaps]))
            for name in ("gap", *(name for _, _, name in _PARTS), "rest")
        }
        high = float(np.quantile([gap["gap"] for gap in gaps], 0.9))
        return {"steps": len(gaps), "gap": middle.pop("gap"), "gap p90": high, **middle}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="demo", help="the demo target or a scale-up of it")
    add_arguments(parser)
    parser.set_defaults(device="cpu", prompt=512, tokens=128)
    arms = [name for name, settings in ARMS.items() if settings and name != "ngram"]
    parser.add_argument("--arms", nargs="+", choices=arms, default=["hybrid", "merged"])
    parser.add_argument("--clock", choices=["wall", "thread"], default="wall")
    args = parser.parse_args()
    bench = Bench(args)
    clock = GapClock(
        bench.engine.runner, time.perf_counter if args.clock == "wall" else time.thread_time
    )
    table = []
    for size, batches in zip(args.batches, batches_of(args.batches, args.prompt), strict=True):
        for arm in args.arms:
            bench.run(arm, batches[:1])  # learns times of steps
            clock.figures()
            bench.run(arm, batches[:1])
            table.append({"batch": size, "drafts": arm, **clock.figures()})
    bench.close()
    settings = settings_of(args, "model device prompt tokens clock draft overlap")
    report("host_gap", settings, table, args.out)


if __name__ == "__main__":
    main()
