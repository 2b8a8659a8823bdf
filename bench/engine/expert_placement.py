"""Hit rates of a bank of experts on stated traces: our placement, LRU, static, the optimum.

    python -m bench.engine.expert_placement [--steps 6000] [--rates 2,8,1000] [--out FILE]

No model runs: a trace is the experts of each layer in each decode step of one sequence. Traces:

- zipf: experts have fixed popularities 1 / rank, other ranks in each layer;
- drift: the same, and `drift_pairs` pairs of experts a layer exchange their ranks every 32 steps;
- uniform: all experts alike, anew in each step: nothing can be learnt;
- texts: each text of 600 steps has popularities 1 / rank of its own, with a prompt of 512 tokens of
  the same popularities in front; over all texts experts are alike;
- recency: experts are chosen by how long ago they were used, from a distribution in which the most
  recent 64 of 512 have 67% and 128 have 81% of the uses, as was reported of a model without static
  skew (llama.cpp #27861); for other numbers of experts in proportion. LRU is the best policy here
  that does not know the future (Coffman and Denning 1973).

Columns: share of uses that the bank holds, in the second half of the trace.

- ours, at each rate of promotions; `copied`: GB/s that it copied on average;
- lru: copies at every miss, in no time; `copied`: what that takes. lru at 2: the same policy where
  a miss is copied only if the rate allows it, and its copy is complete two steps later, as ours;
- static: the best fixed content, known beforehand; min: Belady's, which knows the future and copies
  as much as it wants.

Setups give the bytes of an expert and the duration of a step, which turn GB/s into promotions; a
trace has `--layers` layers, and budgets are scaled from the model's. Promotions are finished two
steps after they were chosen.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numba import njit

from bench.common import bench_parser, names_of, numbers, report
from hetero_llm.core.promotion import Promotion
from hetero_llm.expert_offload.placement import ExpertPlacement, PromotionBudget

_PROMPT, _TEXT = 512, 600
_COPY_STEPS = 2
_DRIFT_EVERY = 32
_RECENCY = ((0.0, 0.0), (16 / 512, 0.36), (64 / 512, 0.67), (128 / 512, 0.81), (1.0, 1.0))
"""Share of the experts, the most recent ones first -> share of the uses."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and a machine: `num_layers` and `step_s` of a decode step turn rates into budgets."""

    name: str
    num_layers: int
    num_experts: int
    per_token: int
    expert_bytes: int
    step_s: float

    def promotions(self, rate: float, layers: int) -> float:
        """A step, of `layers` layers, at `rate` GB/s for the whole model."""
        return rate * 1e9 * self.step_s / self.expert_bytes * layers / self.num_layers

    def gb_per_s(self, promotions: float, layers: int) -> float:
        """The inverse."""
        return promotions * self.expert_bytes * self.num_layers / layers / self.step_s / 1e9


SETUPS = (
    Setup("Qwen3-235B-A22B fp8", 94, 128, 8, 18_874_368, 0.022),
    Setup("Qwen3-30B-A3B bf16", 48, 128, 8, 9_437_184, 0.012),
    Setup("512 experts of 4 bits", 48, 512, 10, 1_769_472, 0.010),
)
TRACES = ("zipf", "drift", "uniform", "texts", "recency")


@dataclass(frozen=True, slots=True)
class Trace:
    """`ids`: [steps, layers, k] int32 experts, flat over the layers. `prompts`: step -> [layers,
    experts] int32 uses of a prompt in front of it."""

    ids: np.ndarray
    prompts: dict[int, np.ndarray]


def _by_popularity(
    rng: np.random.Generator, popularity: np.ndarray, steps: int, k: int
) -> np.ndarray:
    """[steps, layers, k] different experts of each layer: the largest of log p + Gumbel noise."""
    layers, experts = popularity.shape
    noise = rng.gumbel(size=(steps, layers, experts)).astype(np.float32)
    keys = np.log(popularity).astype(np.float32) + noise
    return np.argpartition(-keys, k - 1, axis=-1)[..., :k].astype(np.int32)


def _zipf(rng: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    one = 1 / np.arange(1, experts + 1)
    return np.stack([rng.permutation(one) for _ in range(layers)])


@njit(cache=True)
def _recent(noise: np.ndarray, depths: np.ndarray, experts: int, k: int, ids: np.ndarray) -> None:
    """Fills ids[:, layer] by depths in a stack of the experts, last used first."""
    stack = np.arange(experts)
    at = 0
    for step in range(len(ids)):
        chosen = 0
        while chosen < k:
            depth = min(np.searchsorted(depths, noise[at % len(noise)]), experts - 1)
            at += 1
            expert = stack[depth]
            if (ids[step, :chosen] == expert).any():
                continue
            ids[step, chosen] = expert
            chosen += 1
        for place in range(k):  # the order of use
            expert = ids[step, place]
            depth = 0
            while stack[depth] != expert:
                depth += 1
            stack[1 : depth + 1] = stack[:depth].copy()
            stack[0] = expert


def make_trace(name: str, setup: Setup, *, layers: int, steps: int, seed: int) -> Trace:
    """See the module."""
    rng = np.random.default_rng(seed)
    experts, k = setup.num_experts, setup.per_token
    prompts: dict[int, np.ndarray] = {}
    parts = []
    if name == "zipf":
        parts = [_by_popularity(rng, _zipf(rng, layers, experts), steps, k)]
    elif name == "uniform":
        parts = [_by_popularity(rng, np.ones((layers, experts)), steps, k)]
    elif name == "drift":
        popularity = _zipf(rng, layers, experts)
        for _ in range(0, steps, _DRIFT_EVERY):
            for row in popularity:
                one, other = rng.choice(experts, 2, replace=False)
                row[[one, other]] = row[[other, one]]
            parts.append(_by_popularity(rng, popularity, _DRIFT_EVERY, k))
    elif name == "texts":
        for begin in range(0, steps, _TEXT):
            popularity = _zipf(rng, layers, experts)
            uses = _by_popularity(rng, popularity, _PROMPT, k)
            prompts[begin] = np.stack(
                [np.bincount(uses[:, x].ravel(), minlength=experts) for x in range(layers)]
            ).astype(np.int32)
            parts.append(_by_popularity(rng, popularity, _TEXT, k))
    else:
        shares, uses_of = zip(*_RECENCY, strict=True)
        depths = np.interp(np.arange(1, experts + 1) / experts, shares, uses_of)
        ids = np.zeros((steps, layers, k), np.int32)
        for layer in range(layers):
            one = np.zeros((steps, k), np.int32)
            _recent(rng.random(steps * k * 2), depths, experts, k, one)
            ids[:, layer] = one
        parts = [ids]
    ids = np.concatenate(parts)[:steps]
    return Trace(ids + (np.arange(layers, dtype=np.int32) * experts)[:, None], prompts)


@njit(cache=True)
def lru(ids: np.ndarray, count: int, slots: int, per_step: float, delay: int) -> tuple[int, int]:
    """Hits in the second half, and copies in it.

    Args:
        ids: of a trace. count: experts.
        per_step: copies earned a step.
        delay: steps until a copy is complete; its slot is empty meanwhile. 0: at once.
    """
    last = np.full(count, -1, np.int64)  # use of those in the bank
    ready = np.zeros(count, np.int64)  # step from which those are there
    used, now, credit, hits, copies = 0, 0, 0.0, 0, 0
    half = len(ids) // 2
    for step in range(len(ids)):
        credit = min(credit + per_step, max(1.0, 50 * per_step))
        for expert in ids[step].ravel():
            now += 1
            if last[expert] >= 0:
                hits += step >= half and ready[expert] <= step
            elif credit >= 1.0:
                credit -= 1.0
                copies += step >= half
                ready[expert] = step + delay
                if used == slots:
                    oldest, at = now, -1
                    for one in range(count):
                        if 0 <= last[one] < oldest:
                            oldest, at = last[one], one
                    last[at] = -1
                else:
                    used += 1
            else:
                continue
            last[expert] = now
    return hits, copies


@njit(cache=True)
def belady(ids: np.ndarray, count: int, slots: int) -> int:
    """Hits in the second half of a bank that keeps what is used soonest (Belady 1966), and does not
    take in what would be used last."""
    flat = ids.ravel()
    following = np.empty(len(flat), np.int64)
    seen = np.full(count, len(flat) + 1, np.int64)
    for at in range(len(flat) - 1, -1, -1):
        following[at] = seen[flat[at]]
        seen[flat[at]] = at
    uses = np.full(count, -1, np.int64)  # next use of those in the bank
    used, hits = 0, 0
    half = ids[: len(ids) // 2].size
    for at in range(len(flat)):
        expert = flat[at]
        if uses[expert] >= 0:
            hits += at >= half
            uses[expert] = following[at]
            continue
        if used < slots:
            used += 1
        else:
            latest = np.argmax(uses)
            if uses[latest] <= following[at]:
                continue
            uses[latest] = -1
        uses[expert] = following[at]
    return hits


def static(ids: np.ndarray, count: int, slots: int) -> int:
    """Hits of the best fixed content of the second half."""
    uses = np.bincount(ids[len(ids) // 2 :].ravel(), minlength=count)
    return int(np.sort(uses)[count - slots :].sum())


def ours(
    trace: Trace, setup: Setup, slots: int, *, rate: float, interval: int
) -> tuple[int, int, float]:
    """Hits and promotions of the second half, and milliseconds of a call at the 90th percentile."""
    ids = trace.ids
    steps, layers, _ = ids.shape
    budget = PromotionBudget(
        bytes_per_s=setup.promotions(rate, layers) / setup.step_s, expert_bytes=1
    )
    placement = ExpertPlacement(layers, setup.num_experts, slots, budget=budget)
    placement.fill()
    table = placement.table.reshape(-1)
    waiting: list[tuple[int, Promotion]] = []
    last = 0
    hits = copies = 0
    took = []

    def choose(step: int) -> None:
        nonlocal copies
        chosen = placement.choose()
        copies += len(chosen) * (step >= steps // 2)
        waiting.extend((step + _COPY_STEPS, one) for one in chosen)

    for step in range(steps):
        if step in trace.prompts:
            placement.observe_prompt(trace.prompts[step], tokens=_PROMPT)
            choose(step)
        while waiting and waiting[0][0] <= step:
            placement.finish(waiting.pop(0)[1].slot)
        if step >= steps // 2:
            hits += int(np.count_nonzero(table[ids[step]] >= 0))
        if step + 1 - last >= (interval or placement.interval):
            new = ids[last : step + 1].ravel()
            passed, last = step + 1 - last, step + 1
            counts = np.bincount(new, minlength=table.size).astype(np.int32)
            begin = time.perf_counter()
            placement.observe(
                counts.reshape(layers, -1), steps=passed, seconds=passed * setup.step_s
            )
            choose(step + 1)
            took.append(time.perf_counter() - begin)
    placement.check_integrity()
    return hits, copies, float(np.percentile(took, 90)) * 1e3


def measure(
    trace: Trace, setup: Setup, share: float, *, rates: list[int], interval: int
) -> dict[str, Any]:
    """One row of the table; hit rates in percent."""
    steps, layers, _ = trace.ids.shape
    count = layers * setup.num_experts
    slots = round(share * count)
    half = steps - steps // 2
    uses = trace.ids[steps // 2 :].size

    def percent(hits: int) -> float:
        return round(100 * hits / uses, 1)

    def copied(copies: int) -> float:
        return round(setup.gb_per_s(copies / half, layers), 2)

    found: dict[str, Any] = {}
    for rate in rates:
        hits, copies, took = ours(trace, setup, slots, rate=rate, interval=interval)
        found[f"ours at {rate}"] = percent(hits)
        found[f"copied at {rate}"] = copied(copies)
        found["call ms"] = round(max(took, found.get("call ms", 0.0)), 3)
    hits, copies = lru(trace.ids, count, slots, 1e9, 0)
    found |= {"lru": percent(hits), "lru copied": copied(copies)}
    for rate in rates:
        budget = setup.promotions(rate, layers)
        found[f"lru at {rate}"] = percent(lru(trace.ids, count, slots, budget, _COPY_STEPS)[0])
    found["static"] = percent(static(trace.ids, count, slots))
    found["min"] = percent(belady(trace.ids, count, slots))
    return found


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--traces", type=names_of(TRACES), default=list(TRACES))
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--interval", type=int, default=0, help="steps between calls; 0: as chosen")
    parser.add_argument("--percent", type=numbers, default=[25, 50], help="of experts in the bank")
    parser.add_argument("--rates", type=numbers, default=[2, 8, 1000], help="GB/s of promotions")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    for setup in SETUPS:
        for name in options.traces:
            trace = make_trace(
                name, setup, layers=options.layers, steps=options.steps, seed=options.seed
            )
            for percent in options.percent:
                found = measure(
                    trace, setup, percent / 100, rates=options.rates, interval=options.interval
                )
                rows.append({"setup": setup.name, "trace": name, "bank %": percent, **found})
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    about = {"settings": settings, "setups": [asdict(one) for one in SETUPS]}
    report("expert_placement.c", about, rows, options.out)


if __name__ == "__main__":
    main()
