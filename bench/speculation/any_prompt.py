"""Whether the lookahead cache makes any prompt slower: tokens/s with it over without, by prompt.

    python -m bench.speculation.any_prompt [--rounds 15] [--batch 1] [--prompts third] [--out FILE]

Prompts ("first"): the three of `hetero-llm demo`, 30 ends of held-out code, 10 pieces of prose (the
licence) and 10 of random tokens. The engine's constants were tuned on these. `--prompts other` are
52 more of other kinds, see other_prompts.py for their rule; `--prompts third` are 50 on which no
constant was chosen (third_prompts.py). Greedy unless `--temperature` is given.
They run one at a time, or, with `--batch`, in groups, each named by its first prompt; figures are
those of the group. In each round three engines of this process are made anew: without the cache
("off"), the same again, and with it ("on"), whose cache is empty. Every prompt runs on all three,
in turns. When all have run, each runs again: the cache knows its text then. The demo's prompts are
a new engine's first ones; the order of the others differs by round.

"over off": tokens/s behind the first token over those of "off" beside it, median of the rounds.
"best": the same for the fastest run of each; "cpu": the same by the CPU time of the calling
thread, which other programs on the same cores change least. "noise": "off" over "off again", the
median, too: the difference that this machine makes. "tokens/step": of "on", mean. Prompts are
parted by whether the plain output repeats a span of 16 tokens ("loops").
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from bench.common import Rows, bench_parser, median_ratio, print_table, report, settings_of
from bench.speculation.arms import repeats
from bench.speculation.other_prompts import Prompt, other_prompts
from bench.speculation.third_prompts import third_prompts
from hetero_llm import LLM, SamplingParams
from hetero_llm.commands.demo import DEMO_PROMPTS
from hetero_llm.demo_models import heldout_prompts

_NUM_CODE, _NUM_PROSE, _NUM_RANDOM = 30, 10, 10
_CODE_TOKENS, _RANDOM_TOKENS, _PROSE_CHARS = 192, 64, 600
_SPAN = 16  # tokens, of which a loop repeats one
_GOAL = 0.98
_ARMS: dict[str, dict[str, Any]] = {"off": {}, "off again": {}, "on": {"use_lookahead": True}}
_TIMES = ("text not seen", "seen text")
_LICENCE = Path(__file__).parents[2] / "LICENSE"

Run = dict[str, float]


def prompts(vocab_size: int) -> dict[str, Prompt]:
    """The first set by name, those of the demo first."""
    rng = np.random.default_rng(0)
    found: dict[str, Prompt] = {f"demo {i}": text for i, text in enumerate(DEMO_PROMPTS)}
    held = heldout_prompts().prompts
    for i, row in enumerate(rng.permutation(len(held))[:_NUM_CODE].tolist()):
        found[f"code {i}"] = held[row, -_CODE_TOKENS:].tolist()
    prose = _LICENCE.read_text(encoding="utf-8")
    step = (len(prose) - _PROSE_CHARS) // _NUM_PROSE
    for i in range(_NUM_PROSE):
        found[f"prose {i}"] = prose[i * step : i * step + _PROSE_CHARS].rstrip()
    for i in range(_NUM_RANDOM):
        found[f"random {i}"] = rng.integers(3, vocab_size, _RANDOM_TOKENS).tolist()
    return found


_SETS = {"first": prompts, "other": other_prompts, "third": third_prompts}


def run(llm: LLM, prompts: list[Prompt], params: SamplingParams) -> tuple[Run, list[int]]:
    """Tokens/s behind the first token, tokens per CPU second of this thread, tokens a step of each
    sequence; and the tokens of the first prompt. Figures of all prompts together."""
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(one) if isinstance(one, str) else one for one in prompts]
    before, begin = llm.metrics(), time.thread_time()
    outputs = llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
    cpu, after = time.thread_time() - begin, llm.metrics()
    firsts, lasts, count = [], [], 0
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None and metrics.first_token_time and metrics.last_token_time
        firsts.append(metrics.first_token_time)
        lasts.append(metrics.last_token_time)
        count += len(output.outputs[0].token_ids) - 1
    steps = after["num_steps"] - before["num_steps"] - 1  # but the prompts'
    figures = {
        "tok/s": count / (max(lasts) - min(firsts)),
        "cpu": count / cpu,
        "tokens/step": count / len(ids) / steps,
    }
    return figures, list(outputs[0].outputs[0].token_ids)


def measure(
    args: Any, works: dict[str, Prompt], params: SamplingParams
) -> tuple[dict[tuple[str, str, str], list[Run]], dict[str, bool]]:
    """Runs by prompt, time and arm, one of each round; and which prompts' plain output loops."""
    runs: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    loops: dict[str, bool] = {}
    texts, names = list(works.values()), list(works)
    groups = {names[at]: texts[at : at + args.batch] for at in range(0, len(names), args.batch)}
    for number in range(args.rounds):
        rng = np.random.default_rng(number)
        others = [name for name in groups if not name.startswith("demo")]
        order = [name for name in groups if name.startswith("demo")]
        order += [others[i] for i in rng.permutation(len(others))]
        threads = {} if args.threads is None else {"cpu_threads": args.threads}
        engines = {arm: LLM(args.model, **threads, **more) for arm, more in _ARMS.items()}
        for llm in engines.values():
            llm.generate("import", params, use_tqdm=False)
        for when in _TIMES:
            for name in order:
                for arm in rng.permutation(list(_ARMS)).tolist():
                    figures, tokens = run(engines[arm], groups[name], params)
                    runs[name, when, arm].append(figures)
                    if arm == "off":
                        loops[name] = repeats(tokens, _SPAN)
        for llm in engines.values():
            llm.close()
    return runs, loops


def rows_of(runs: dict[tuple[str, str, str], list[Run]], loops: dict[str, bool]) -> Rows:
    """A row for each prompt and time."""
    rows = []
    for name, looping in loops.items():
        for when in _TIMES:
            off, again, on = (runs[name, when, arm] for arm in _ARMS)

            def over(which: str, some: list[Run], others: list[Run]) -> float:
                return median_ratio([a[which] for a in some], [b[which] for b in others])

            rows.append({
                "prompt": name, "time": when, "loops": looping,
                "off": median(one["tok/s"] for one in off),
                "on": median(one["tok/s"] for one in on),
                "over off": over("tok/s", on, off),
                "best": max(one["tok/s"] for one in on) / max(one["tok/s"] for one in off),
                "cpu": over("cpu", on, off), "noise": over("tok/s", off, again),
                "tokens/step": mean(one["tokens/step"] for one in on),
            })  # fmt: skip
    return rows


def summary(rows: Rows) -> Rows:
    """A row for each kind of prompts and time: least and median ratios, share below the goal."""
    table = []
    kinds: dict[str, Any] = {
        **{
            kind: lambda row, kind=kind: row["prompt"].startswith(kind)
            for kind in dict.fromkeys(row["prompt"].split()[0] for row in rows)
        },
        "without loops": lambda row: not row["loops"],
        "with loops": lambda row: row["loops"],
        "all": lambda row: True,
    }
    for when in _TIMES:
        for kind, is_of in kinds.items():
            of = [row for row in rows if row["time"] == when and is_of(row)]
            if not of:
                continue
            table.append({
                "time": when, "prompts": kind, "number": len(of),
                "median": median(row["over off"] for row in of),
                "least": min(row["over off"] for row in of),
                "below goal": mean(row["over off"] < _GOAL for row in of),
                "least best": min(row["best"] for row in of),
                "median cpu": median(row["cpu"] for row in of),
                "least cpu": min(row["cpu"] for row in of),
                "cpu below goal": mean(row["cpu"] < _GOAL for row in of),
                "noise below goal": mean(row["noise"] < _GOAL for row in of),
                "tokens/step": mean(row["tokens/step"] for row in of),
            })  # fmt: skip
    return table


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="of the engines (default: theirs)")
    parser.add_argument("--tokens", type=int, default=96, help="of each output")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1, help="prompts that run together")
    parser.add_argument("--prompts", choices=tuple(_SETS), default="first", help="the set to run")
    args = parser.parse_args()
    params = SamplingParams(
        temperature=args.temperature, seed=0, max_tokens=args.tokens, ignore_eos=True
    )
    runs, loops = measure(args, _SETS[args.prompts](vocab_size=4096), params)
    rows = rows_of(runs, loops)
    print_table(rows)
    named = "model tokens rounds threads temperature batch prompts"
    about = {**settings_of(args, named), "goal": _GOAL, "by prompt": rows}
    report("any_prompt.c", about, summary(rows), args.out)


if __name__ == "__main__":
    main()
