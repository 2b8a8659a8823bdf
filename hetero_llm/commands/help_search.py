"""`--help=WORD`: a part of a long help, as `vllm serve --help=WORD` shows it."""

from __future__ import annotations

import argparse
import pydoc
import sys

_OF_VLLM = {
    "frontend": ("server", "serving"),
    "modelconfig": ("model", "tokenizer"),
    "loadconfig": ("model",),
    "cacheconfig": ("device and memory", "prefix cache offload"),
    "parallelconfig": ("parallelism",),
    "schedulerconfig": ("scheduling and execution",),
    "speculativeconfig": ("speculative decoding", "lookahead cache"),
    "structuredoutputsconfig": ("structured output and reasoning",),
    "loraconfig": ("adapters",),
    "poolerconfig": ("embeddings and scores",),
}
"""vLLM's groups of arguments -> ours."""


def show_help(parser: argparse.ArgumentParser, wanted: str) -> None:
    """Prints the whole help ("all", "page": with a pager), the groups ("listgroup"), one group, or
    the flags with a word in their names. It ends the program, with exit code 2 if there are none.
    """
    if wanted == "page":
        pydoc.pager(parser.format_help())
        parser.exit()
    if wanted == "all":
        parser.print_help()
        parser.exit()
    groups = {
        str(group.title).casefold(): group
        for group in parser._action_groups
        if any(action.help != argparse.SUPPRESS for action in group._group_actions)
    }
    if wanted == "listgroup":
        sys.stdout.write("".join(f"{group.title}\n" for group in groups.values()))
        parser.exit()
    word = wanted.casefold()
    chosen = [groups[name] for name in _OF_VLLM.get(word, (word,)) if name in groups]
    formatter = parser._get_formatter()
    for group in chosen:
        formatter.start_section(group.title)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
    if not chosen:
        flags = _with_name(parser, word.lstrip("-").replace("_", "-"))
        if not flags:
            parser.error(
                f"argument --help: {wanted!r} is neither a group nor a part of a flag; "
                "--help=listgroup shows the groups, --help=all everything"
            )
        formatter.add_arguments(flags)
    sys.stdout.write(formatter.format_help())
    parser.exit()


def _with_name(parser: argparse.ArgumentParser, word: str) -> list[argparse.Action]:
    """The flags shown in the help that have the word in a name; one of exactly this name alone."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    exact = [action for action in shown if f"--{word}" in action.option_strings]
    return exact or [
        action for action in shown if word and any(word in flag for flag in action.option_strings)
    ]
