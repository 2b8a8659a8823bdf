"""Write docs/models.md: every row of TACO-LLM's table of models, and what runs it here.

python -m tools.gen_models_doc            # write it
python -m tools.gen_models_doc --check    # exit code 1 if it is out of date

Classes come from the registry, the CPU executor's column from asking it, the tests from the tables
that drive them; what no program can know (names of models, limits) is in `models_doc_rows.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from bench.engine.families import FAMILIES as FAMILY_SHAPES
from bench.shapes import MOE_SHAPES
from hetero_llm.core.errors import ModelLoadError
from hetero_llm.cpu.executor import unsupported_reason
from hetero_llm.models.llama import LlamaForCausalLM
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import FAMILIES, model_class
from tests.models.tiny import VARIANTS
from tools.models_doc_rows import IMAGES, INTRODUCTION, NOTES, TEXT, ImageRow, TextRow

ROOT = Path(__file__).parents[1]
SHAPES = {**FAMILY_SHAPES, **MOE_SHAPES}
TARGET = ROOT / "docs" / "models.md"
_TEXT_HEAD = (
    "Architecture", "Models", "Class here", "Runs by", "Lookahead cache", "CPU draft as target",
    "Offload", "CPU executor", "Tested how",
)  # fmt: skip
_IMAGE_HEAD = ("Architecture", "Models", "Class here", "State", "Tested how")


def render() -> str:
    """The whole document."""
    listed = {name for row in TEXT for name in row.architectures}
    own = sorted(FAMILIES.keys() - listed - {row.architecture for row in IMAGES})
    if own:
        raise SystemExit(f"no row for {', '.join(own)}: add it to tools/models_doc_rows.py")
    rows = [_text_row(row) for row in TEXT]
    image_rows = [_image_row(row) for row in IMAGES]
    for cells in (*rows, *image_rows):
        assert all(cells), f"an empty cell: {cells}"
    parts = (INTRODUCTION, "## Text\n\n", _table(_TEXT_HEAD, rows))
    return "".join((*parts, "\n## Images\n\n", _table(_IMAGE_HEAD, image_rows), "\n", NOTES))


def _text_row(row: TextRow) -> Sequence[str]:
    families = [FAMILIES[name] for name in row.architectures if name in FAMILIES]
    names = ", ".join(f"`{name}`" for name in row.architectures)
    if not families:
        cells = ("none", row.remark, *["no"] * 4, row.tested)
        return (names, row.models, *cells)
    family = families[0]
    path = f"`models/{family.module}.py`"
    # Drafts, cached and offloaded KV know tokens and blocks, whatever the family.
    features = ("yes", "yes", "yes, with a GPU")
    return (names, row.models, path, "native file", *features, _executor(row), _tested(row))


def _executor(row: TextRow) -> str:
    """What the CPU's own executor says of the family's usual shape."""
    if not row.shape:
        assert not issubclass(model_class(row.architectures[0]), LlamaForCausalLM), row
        return "torch"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[row.shape]))
        try:
            config = load_model_config(Path(folder))
        except ModelLoadError as error:
            raise SystemExit(f"the shape {row.shape!r}: {error}") from error
    reason = unsupported_reason(config, torch.bfloat16)
    return "native" if reason is None else "torch"


def _tested(row: TextRow) -> str:
    count = sum(family in row.tiny for family, _ in VARIANTS)
    parts = []
    if row.tiny:
        missing = set(row.tiny) - {family for family, _ in VARIANTS}
        assert not missing, f"no tiny checkpoint of {missing}"
        parts.append(f"{count} tiny variant{'s' * (count > 1)} against transformers' class")
    for file in row.test_files:
        assert (ROOT / file).is_file(), f"{file}: no such test"
        parts.append(f"`{file}`")
    if row.tested:
        parts.append(row.tested)
    return "; ".join(parts)


def _image_row(row: ImageRow) -> Sequence[str]:
    for file in row.test_files:
        assert (ROOT / file).is_file(), f"{file}: no such test"
    tested = "; ".join(
        (*(f"`{file}`" for file in row.test_files), *([row.tested] * bool(row.tested)))
    )
    return (f"`{row.architecture}`", row.models, row.runs_by, row.state, tested)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = render()
    if not args.check:
        TARGET.write_text(text)
    elif not TARGET.exists() or TARGET.read_text() != text:
        sys.exit(f"{TARGET.name} is out of date: run python -m tools.gen_models_doc")


if __name__ == "__main__":
    main()
