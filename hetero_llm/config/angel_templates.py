"""Angel-vLLM's table of conversation templates: what `run` adds for a model by its name.

Data only. The files are our own writing of the published formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True, slots=True)
class TemplateRow:
    """A series of models. It is chosen by CONV_TEMPLATE, one of `names`, or by MODEL_ID, in lower
    case, which holds all of `has`, one of `has_one` and none of `lacks`.

    Attributes:
        template: file in `FOLDER`; None: the model's own template.
        stop_token_ids: of requests that name none.
        tool_call_parser: how the models write calls of tools.
        options: further engine arguments.
        unpublished: the format is not public, so that a template has to be given.
    """

    names: tuple[str, ...]
    has: tuple[str, ...] = ()
    has_one: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    template: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    tool_call_parser: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    unpublished: bool = False


_TUNED = ("instruct", "chat")

TEMPLATE_ROWS = (
    TemplateRow(("generate",), template="generate.jinja"),
    TemplateRow(
        ("hunyuan",),
        has=("hunyuan-large",),
        template="hunyuan.jinja",
        stop_token_ids=(127960, 127967),
    ),
    TemplateRow(("shennong_chat",), has_one=("shennong", "sn-"), unpublished=True),
    TemplateRow(
        ("llama-3.2-vision",),
        has=("llama-3.2", "vision"),
        has_one=_TUNED,
        tool_call_parser="llama3_json",
        options={"enforce_eager": True, "max_num_seqs": 8},
    ),
    TemplateRow(
        ("llama-3.2",),
        has=("llama-3.2",),
        has_one=_TUNED,
        lacks=("vision",),
        tool_call_parser="llama3_json",
    ),
    TemplateRow(("llama-3.1",), has=("llama-3.1",), has_one=_TUNED, tool_call_parser="llama3_json"),
    TemplateRow(("qwen2.5",), has=("qwen2.5",), has_one=_TUNED, tool_call_parser="hermes"),
    TemplateRow(
        ("baichuan2-chat",), has=("baichuan2",), has_one=_TUNED, template="baichuan2.jinja"
    ),
    TemplateRow(("llama-2",), has=("llama-2",), has_one=_TUNED, template="llama2.jinja"),
    TemplateRow(
        ("llama-3",),
        has=("llama-3-",),
        has_one=_TUNED,
        template="llama3.jinja",
        stop_token_ids=(128001, 128009),
    ),
    TemplateRow(
        ("qwen", "qwen-7b-chat"),
        has=("qwen",),
        has_one=_TUNED,
        lacks=("vl",),
        template="qwen.jinja",
        stop_token_ids=(151643, 151644, 151645),
    ),
)
"""In the order in which they are tried."""


def find_row(conv_template: str | None, model_id: str | None) -> TemplateRow | None:
    """The first row that one of the two names chooses; None if there is none."""
    name = (model_id or "").lower()
    return next(
        (row for row in TEMPLATE_ROWS if conv_template in row.names or _is_named(row, name)), None
    )


def _is_named(row: TemplateRow, name: str) -> bool:
    if not (row.has or row.has_one):
        return False
    return (
        all(part in name for part in row.has)
        and (not row.has_one or any(part in name for part in row.has_one))
        and not any(part in name for part in row.lacks)
    )
