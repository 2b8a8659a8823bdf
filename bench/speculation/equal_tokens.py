"""How often greedy outputs are equal in every token: between two batch sizes, and with drafts.

    python -m bench.speculation.equal_tokens --model TARGET [--draft DRAFT] [--dtype bfloat16]

A step of other tokens rounds sums differently in the last bits; where the two best tokens are that
close, one run takes the one and another run the other, and what follows differs. Drafts change
which tokens a step holds, and so does the batch size. This bench puts the rates of both side by
side: the same prompts, whose plain output repeats no span of 32 tokens (as in `never_slower`), go
through one engine without drafts in each batch size of --batches, and with each arm of --arms
(and `draft`, if --draft is given) in each batch size. Cold drafters.

"plain": the run that the outputs are compared with. "equal": share of requests with the same tokens
from the first to the last. "prefix": mean number of tokens before the first difference, all of them
where there is none. "nodes/token", "tokens/step": drafted nodes for each token, tokens that came
from one step. The first row is the first plain run once more: 1.0 unless runs differ by themselves.
"""

from __future__ import annotations

import numpy as np

from bench.common import Rows, bench_parser, names_of, report, settings_of
from bench.speculation.arms import ARMS, Bench, add_arguments
from bench.speculation.never_slower import calm_prompts

Outputs = list[list[int]]


def equal_prefix(found: list[int], plain: list[int]) -> int:
    """Number of tokens before the first difference; the length if there is none."""
    pairs = zip(found, plain, strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(plain))


def compared(found: Outputs, plain: Outputs) -> dict[str, float]:
    """`equal` and `prefix` of the module's text, of outputs of the same prompts in one order."""
    prefixes = [equal_prefix(a, b) for a, b in zip(found, plain, strict=True)]
    whole = [n == len(tokens) for n, tokens in zip(prefixes, plain, strict=True)]
    return {"equal": float(np.mean(whole)), "prefix": float(np.mean(prefixes))}


def measure(bench: Bench, prompts: Outputs, sizes: list[int], arms: list[str]) -> Rows:
    """One row for each comparison.

    Args:
        prompts: token ids; every size divides their number.
        sizes: batch sizes, the one that others are compared with first.
        arms: of `ARMS`, beside "none".
    """
    rows: Rows = []

    def run(arm: str, size: int) -> tuple[Outputs, dict[str, float]]:
        return bench.run(arm, [prompts[at : at + size] for at in range(0, len(prompts), size)])

    def note(name: str, plain_name: str, arm: str, size: int, plain: Outputs | None) -> Outputs:
        outputs, figures = run(arm, size)
        if plain is not None:
            rows.append({
                "run": name, "plain": plain_name, **compared(outputs, plain),
                "nodes/token": figures["drafted/token"], "tokens/step": figures["tokens/step"],
            })  # fmt: skip
        return outputs

    names = {size: f"batch {size}" for size in sizes}
    first = note(names[sizes[0]], "", "none", sizes[0], None)
    note(f"{names[sizes[0]]} again", names[sizes[0]], "none", sizes[0], first)
    plain = {sizes[0]: first}
    for size in sizes[1:]:
        plain[size] = note(names[size], names[sizes[0]], "none", size, first)
    for arm in arms:
        for size in sizes:
            note(f"{names[size]}, {arm}", names[size], arm, size, plain[size])
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    add_arguments(parser)
    parser.set_defaults(prompt=768, tokens=192)
    parser.add_argument("--model", required=True, help="the demo target or a scale-up of it")
    parser.add_argument("--prompts", type=int, default=64, help="every batch size divides it")
    parser.add_argument("--arms", type=names_of(tuple(ARMS)), default=["hybrid", "merged"])
    args = parser.parse_args()
    if any(args.prompts % size for size in args.batches):
        parser.error(f"--prompts {args.prompts}: every size of --batches must divide it")
    arms = [*args.arms, *(["draft"] if args.draft else [])]
    bench = Bench(args)
    prompts = calm_prompts(bench, args.prompts, args.prompt, max(args.batches))
    rows = measure(bench, prompts, args.batches, arms)
    bench.close()
    settings = settings_of(args, "model draft device dtype prompts prompt")
    report(f"equal_tokens.{args.dtype}", {**settings, "tokens": args.tokens + 1}, rows, args.out)


if __name__ == "__main__":
    main()
