"""Write docs/flags.md from the argument table and from `SamplingParams`.

python tools/gen_flags_doc.py            # write it
python tools/gen_flags_doc.py --check    # exit code 1 if it is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hetero_llm.config.args import ARGS, ArgSpec, Kind, Status
from hetero_llm.config.args_sampling import SAMPLING_ARGS
from hetero_llm.config.foreign_args import FOREIGN_ARGS
from hetero_llm.config.foreign_spec import ForeignArg

TARGET = Path(__file__).parents[1] / "docs" / "flags.md"

INTRODUCTION = """\
# Arguments

Every argument of TACO-LLM's manual, and a few of our own. This file is generated from the table
in `hetero_llm/config/args_*.py` by `tools/gen_flags_doc.py`; do not edit it.

The same table serves Python, as `LLM(model, max_model_len=4096)`, and the command line, as
`hetero-llm generate MODEL --max-model-len 4096`. Flags may be written with `-` or `_`; a switch
`--x` has its opposite `--no-x`; mappings are written as JSON. Arguments of vLLM that are not in
this table are [at the end](#vllms-other-arguments); any other name is an error that suggests the
nearest one.

| Status | What happens to a value |
|---|---|
| effective | It is checked, then used. A wrong type or a value out of range is an error. |
| obsolete | Anything is accepted, with one notice line: nothing here needs it. |
| not yet | The default (or None) is accepted. Anything else is an error naming the feature. |

"""

DEVIATIONS = """\
## Deviations from TACO-LLM's defaults

- `enable_prefix_caching` is **on**; `--no-enable-prefix-caching` switches it off.
- `dtype="auto"` takes the checkpoint's type, except that float32 checkpoints become
  **bfloat16** on the CPU and on GPUs that have it (TACO-LLM: float16), and that float16
  checkpoints become bfloat16 on the CPU, which has no fast float16 path.
- `host` is **127.0.0.1**: a server is reachable from other machines only when that is set.
- `trust_remote_code` stays off; with it, code that comes with a model or its tokenizer may run.
- `enable_chunked_prefill` is on unless switched off; there is no separate prefill phase.
- `gpu_memory_utilization` also limits, on the CPU, the share of free host memory for the KV cache.
- `seed` of the engine seeds every request without a seed of its own, in order of arrival.

"""

SAMPLING_INTRODUCTION = """\
## SamplingParams

Fields of `SamplingParams(...)`; on the command line the same names as flags. Log probabilities
are those of the model's own distribution, before penalties, temperature and filters, as in vLLM.
A temperature below 1e-5 is greedy. A value out of range is an error naming the field.

"""


FOREIGN_INTRODUCTION = """
## vLLM's other arguments

Arguments of vLLM 0.6 to 0.33 that mean nothing here, or not yet. The same rules hold on the command
line, in the file of `--config`, and in Python. None, `{}`, `[]` and "" always ask for nothing.

Accepted with any value and one notice line, because no answer depends on them:

"""

FOREIGN_FEATURES = """
Accepted with a harmless value and one notice line; any other value is an error that names the
feature:

"""


def render() -> str:
    """The whole document."""
    parts = [INTRODUCTION, _summary(), DEVIATIONS]
    for group, specs in groupby(ARGS, key=lambda spec: spec.group):
        rows: list[Sequence[str]] = [
            (_flags(s), _code(s.default), _status(s), _meaning(s)) for s in specs
        ]
        parts.append(f"## {group}\n\n{_table(('Flag', 'Default', 'Status', 'Meaning'), rows)}\n")
    rows = [(f"`{s.name}`", _code(s.default), s.help) for s in SAMPLING_ARGS]
    parts.append(SAMPLING_INTRODUCTION + _table(("Field", "Default", "Meaning"), rows))
    parts += [FOREIGN_INTRODUCTION, _foreign_tuning(), FOREIGN_FEATURES, _foreign_features()]
    return "".join(parts)


def _foreign_tuning() -> str:
    flags: dict[str, list[str]] = {}
    for arg in FOREIGN_ARGS:
        if not arg.feature:
            flags.setdefault(arg.reason, []).append(_foreign_flags(arg))
    return _table(("Why", "Flags"), [(why, ", ".join(all_)) for why, all_ in flags.items()])


def _foreign_features() -> str:
    rows = []
    for arg in FOREIGN_ARGS:
        if arg.feature:
            instead = f"; use {arg.instead}" if arg.instead else ""
            rows.append((_foreign_flags(arg), _codes(arg.harmless), arg.feature + instead))
    return _table(("Flag", "Harmless", "Not available yet"), rows)


def _foreign_flags(arg: ForeignArg) -> str:
    aliases = ["--" + alias.replace("_", "-") for alias in arg.aliases]
    return ", ".join(f"`{flag}`" for flag in (*arg.short, arg.flag, *aliases))


def _summary() -> str:
    counts = Counter(spec.status for spec in ARGS)
    listed = ", ".join(f"{counts[status]} {status.value}" for status in Status)
    return f"{len(ARGS)} arguments: {listed}.\n\n"


def _flags(spec: ArgSpec) -> str:
    aliases = ["--" + alias.replace("_", "-") for alias in spec.aliases]
    return ", ".join(f"`{flag}`" for flag in (*spec.short, spec.flag, *aliases))


def _status(spec: ArgSpec) -> str:
    return f"not yet: {spec.feature}" if spec.status is Status.NOT_YET else spec.status.value


def _meaning(spec: ArgSpec) -> str:
    parts = [spec.help]
    if spec.kind is Kind.JSON:
        parts.append("JSON.")
    if spec.choices:
        parts.append(f"One of {_codes(spec.choices)}.")
    if spec.later_choices:
        parts.append(f"Not yet: {_codes(spec.later_choices)}.")
    if spec.reason:
        parts.append(f"Not needed: {spec.reason}")
    return " ".join(parts)


def _codes(values: Iterable[Any]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _code(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, tuple):
        return _codes(value)
    return f"`{value}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/flags.md.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    text = render()
    if not parser.parse_args().check:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET.name} is out of date: run python tools/gen_flags_doc.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
