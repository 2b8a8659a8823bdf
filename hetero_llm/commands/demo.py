"""`hetero-llm demo`: the embedded model continues three snippets, then its speed is shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hetero_llm.commands.console import (
    DEMO_MODEL,
    llm_class,
    note_neighbours,
    shortened,
    stream_text,
    write,
)
from hetero_llm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hetero_llm.core.outputs import RequestOutput

DEMO_PROMPTS = (
    "import os\nimport sys\n\n\n"
    'def read_file(path):\n    """Return the contents of the file at path."""\n    with open(',
    "class Node:\n"
    "    def __init__(self, value, next=None):\n"
    "        self.value = value\n"
    "        self.next = next\n\n"
    "    def __repr__(self):\n"
    "        return",
    'def is_prime(n):\n    """Return True if n is a prime number."""\n    for i in range(',
)
"""Prompts that end within a line, where a small model continues best."""

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_demo(parser: argparse.ArgumentParser, finish: Callable[..., None]) -> None:
    """Fills the parser of `demo`."""
    parser.add_argument("--model", default=DEMO_MODEL, help="model to use (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=96, help="tokens for each snippet (default: %(default)s)"
    )
    finish(parser, run_demo)


def run_demo(options: argparse.Namespace) -> int:
    """Streams the demo model's continuations, then shows their speed."""
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    dim, undim = (_DIM, _PLAIN) if sys.stdout.isatty() else ("", "")
    shown: list[RequestOutput] = []
    note_neighbours()
    with llm_class()(options.model) as llm:
        for prompt in DEMO_PROMPTS:
            write(f"{dim}{prompt}{undim}")
            shown.append(stream_text(llm.stream(prompt, params)))
            write("\n\n")
        plain = _one_after_another(llm, params)
        backend = llm.backend
    write(speed_table(shown))
    if backend == "native":
        with llm_class()(options.model, cpu_backend="torch") as llm:
            write(backend_line(plain, _one_after_another(llm, params)))
    with llm_class()(options.model, use_lookahead=True) as llm:
        for what in ("text that it has not seen", "the same text again"):
            before = llm.metrics()
            drafted = _one_after_another(llm, params)
            words = lookahead_words(plain, drafted, before, llm.metrics())
            write(f"lookahead cache, {what}: {words}\n")
    return 0


def _one_after_another(llm: Any, params: SamplingParams) -> list[RequestOutput]:
    """The outputs of the demo's prompts, each alone, without a stream to be shown."""
    return [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in DEMO_PROMPTS]


def lookahead_words(
    plain: Sequence[RequestOutput],
    drafted: Sequence[RequestOutput],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> str:
    """Speed and tokens per step with drafts, and the speedup over `plain`.

    Args:
        plain, drafted: outputs without and with drafts, of the same prompts one after another.
        before, after: the engine's metrics before and after `drafted`.
    """
    tokens, accepted = (
        after[name] - before[name]
        for name in ("generation_tokens", "spec_decode_num_accepted_tokens")
    )
    ours, theirs = _rate(drafted), _rate(plain)
    times = f", {ours / theirs:.1f}x" if theirs else ""
    return f"{ours:.0f} tokens/s{times}, {tokens / max(tokens - accepted, 1):.1f} tokens a step"


def backend_line(native: Sequence[RequestOutput], torch: Sequence[RequestOutput]) -> str:
    """Speed of the native executor and of torch on the same prompts, one after another."""
    ours, theirs = _rate(native), _rate(torch)
    if not ours or not theirs:
        return ""
    return (
        f"native executor {ours:.0f} tokens/s, torch on this CPU {theirs:.0f}: "
        f"{ours / theirs:.1f}x\n"
    )


def _rate(outputs: Sequence[RequestOutput]) -> float:
    """Tokens/s after the first token of each output; 0 if there are none."""
    tokens, seconds = 0, 0.0
    for output in outputs:
        metrics = output.metrics
        if metrics is None or metrics.first_token_time is None or metrics.last_token_time is None:
            continue
        tokens += sum(len(one.token_ids) for one in output.outputs) - 1
        seconds += metrics.last_token_time - metrics.first_token_time
    return tokens / seconds if seconds > 0 else 0.0


def speed_table(outputs: Sequence[RequestOutput]) -> str:
    """One line for each output: prompt, tokens, tokens/s after the first, time to the first."""
    rows = [("prompt", "tokens", "tokens/s", "first token, ms")]
    for output in outputs:
        tokens = sum(len(one.token_ids) for one in output.outputs)
        rate, first = _speed(output, tokens)
        rows.append((shortened(output.prompt or ""), str(tokens), rate, first))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0])]
                  + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)])
        for row in rows
    ]  # fmt: skip
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines) + "\n(tokens/s counts the tokens after the first)\n"


def _speed(output: RequestOutput, tokens: int) -> tuple[str, str]:
    metrics = output.metrics
    if metrics is None or metrics.first_token_time is None:
        return "-", "-"
    first = f"{(metrics.first_token_time - metrics.arrival_time) * 1e3:.1f}"
    seconds = (metrics.last_token_time or metrics.first_token_time) - metrics.first_token_time
    return (f"{(tokens - 1) / seconds:.1f}" if tokens > 1 and seconds > 0 else "-"), first
