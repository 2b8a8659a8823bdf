"""How models write tool calls and reasoning, as data.

Names are those of vLLM's --tool-call-parser and --reasoning-parser. What the formats look like is
from the models' chat templates and cards; each description has an example.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hetero_llm.core.reasoning_formats import (
    HARMONY_NAMES,
    ReasoningFormat,
    reasoning_format,
)


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as JSON objects, each with the function's name and its arguments.

    Attributes:
        name_key: of the function's name.
        argument_keys: of the arguments; the first is the one to write.
        separators: characters besides white space that may stand between objects.
        as_list: the model writes a list of objects. Both forms are read.
    """

    name_key: str = "name"
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    separators: str = ""
    as_list: bool = False


@dataclass(frozen=True, slots=True)
class HeadedCalls:
    """Calls as a header with the function's name, and a JSON object of arguments after it.

    Attributes:
        header: of all text before the first brace; its group "name" is the function's name, "id",
            where there is one, the call's id.
        written: how to write a header; {name} and {index} stand for the function and the number of
            the call.
        opens: before each header.
        tail: after the arguments.
        closes: after each call.
        inside: markup that a header may hold besides what is `written`.
        as_json: how calls are written if a list or an object comes in place of a header.
    """

    header: re.Pattern[str]
    written: str
    inside: tuple[str, ...] = ()
    opens: str = ""
    tail: str = ""
    closes: str = ""
    as_json: JsonCalls | None = None


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Calls in tags, with one tag for each argument. A string stands in its tag as it is; other
    values are written as JSON.

    Attributes:
        opens: before the function's name.
        name_ends: after it, one of these, of which empty ones stand before the next tag.
        parameter: before an argument's name.
        key_ends: after it, as a pattern, and as it is written.
        value_ends: after the value.
        trims: the value stands on lines of its own.
        closes: after each call.
    """

    opens: str
    name_ends: str
    parameter: str
    key_ends: re.Pattern[str]
    key_end_written: str
    value_ends: str
    closes: str
    trims: bool = False


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls as Python writes them, with keyword arguments that are literals.

    Attributes:
        bracketed: a list of calls, else one call a line.
    """

    bracketed: bool = True


CallBody = JsonCalls | HeadedCalls | TaggedCalls | PythonCalls


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes its tool calls.

    Attributes:
        opens: markers, each of which begins a section of calls; the first is the one to write. What
            a body begins with may be one of them, for models that leave the first one out.
        closes: the marker that ends a section; empty: the section ends with the last call.
        bare: a message may also begin with a call that has no marker before it, with one of these
            characters; only functions that the request declares are then calls.
        in_reasoning: calls may stand inside of reasoning, which they end.
        several: the model writes several calls in one section, else a section for each.
        written: how it writes a section: what stands before its calls, between two calls or two
            sections, and after them.
        id_form: "call": any; "mistral": nine letters and digits; "header": the model writes it.
    """

    name: str
    body: CallBody
    opens: tuple[str, ...] = ()
    closes: str = ""
    bare: str = ""
    in_reasoning: bool = False
    several: bool = True
    written: tuple[str, str, str] = ("", "", "")
    id_form: str = "call"
    example: str = ""


@dataclass(frozen=True, slots=True)
class Channels:
    """Harmony: a message consists of parts, each with a header that names its channel and, for a
    call, its recipient.

    Attributes:
        part: begins a header after another part.
        channel: inside of a header, before the channel's name.
        message: ends a header.
        ends: after a part.
        regions: the region of each channel.
        recipient: of a call, in the header; its group "name" is the function's name.
    """

    name: str = "openai"
    part: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")
    regions: dict[str, str] = field(
        default_factory=lambda: {
            "analysis": "reasoning",
            "commentary": "content",
            "final": "content",
        }
    )
    recipient: re.Pattern[str] = re.compile(r"\bto=functions\.(?P<name>[\w.\-]+)")


_JSON = JsonCalls()
_MISTRAL_HEADER = re.compile(
    r"(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?\s*"
)
_SEP = "<｜tool▁sep｜>"

HARMONY = Channels()

TOOL_FORMATS: dict[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat(
            "hermes",
            _JSON,
            opens=("<tool_call>",),
            closes="</tool_call>",
            several=False,
            written=("<tool_call>\n", "\n", "\n</tool_call>"),
            example='<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        ),
        ToolFormat(
            "llama3_json",
            JsonCalls(argument_keys=("parameters", "arguments"), separators=";"),
            opens=("<|python_tag|>",),
            bare="{",
            written=("", "; ", ""),
            example='{"name": "f", "parameters": {"a": 1}}',
        ),
        ToolFormat(
            "pythonic", PythonCalls(), bare="[", written=("[", ", ", "]"), example="[f(a=1)]"
        ),
        ToolFormat(
            "llama4_pythonic",
            PythonCalls(),
            opens=("<|python_start|>",),
            closes="<|python_end|>",
            bare="[",
            written=("[", ", ", "]"),
            example="[f(a=1)]",
        ),
        ToolFormat(
            "olmo3",
            PythonCalls(bracketed=False),
            opens=("<function_calls>",),
            closes="</function_calls>",
            written=("<function_calls>", "\n", "</function_calls>"),
            example="<function_calls>f(a=1)\ng()</function_calls>",
        ),
        ToolFormat(
            "mistral",
            HeadedCalls(
                header=_MISTRAL_HEADER,
                written="{name}[ARGS]",
                inside=("[CALL_ID]",),
                as_json=JsonCalls(as_list=True),
            ),
            opens=("[TOOL_CALLS]",),
            several=False,
            id_form="mistral",
            written=("[TOOL_CALLS]", "", ""),
            example='[TOOL_CALLS]f[ARGS]{"a": 1}',
        ),
        ToolFormat(
            "internlm",
            JsonCalls(argument_keys=("parameters", "arguments")),
            opens=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
            closes="<|action_end|>",
            several=False,
            written=("<|action_start|><|plugin|>\n", "\n", "<|action_end|>"),
            example=(
                '<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>'
            ),
        ),
        ToolFormat(
            "qwen3_coder",
            TaggedCalls(
                opens="<function=",
                name_ends=">",
                parameter="<parameter=",
                key_ends=re.compile(">"),
                key_end_written=">\n",
                value_ends="</parameter>",
                closes="</function>",
                trims=True,
            ),
            opens=("<tool_call>", "<function="),
            closes="</tool_call>",
            in_reasoning=True,
            several=False,
            written=("<tool_call>\n", "\n", "\n</tool_call>"),
            example=(
                "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
                "</tool_call>"
            ),
        ),
        ToolFormat(
            "deepseek_v3",
            HeadedCalls(
                opens="<｜tool▁call▁begin｜>",
                header=re.compile(rf"function{_SEP}(?P<name>[^\s{{]+)\s*```json\s*"),
                written=f"function{_SEP}{{name}}\n```json\n",
                tail="\n```",
                closes="<｜tool▁call▁end｜>",
            ),
            opens=("<｜tool▁calls▁begin｜>",),
            closes="<｜tool▁calls▁end｜>",
            written=("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
            example=(
                f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{_SEP}f\n"
                '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            ),
        ),
        ToolFormat(
            "deepseek_v31",
            HeadedCalls(
                opens="<｜tool▁call▁begin｜>",
                header=re.compile(rf"(?P<name>[^\s<{{]+)\s*{_SEP}\s*"),
                written=f"{{name}}{_SEP}",
                closes="<｜tool▁call▁end｜>",
            ),
            opens=("<｜tool▁calls▁begin｜>",),
            closes="<｜tool▁calls▁end｜>",
            written=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
            example=(
                f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{_SEP}"
                '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            ),
        ),
        ToolFormat(
            "glm45",
            TaggedCalls(
                opens="",
                name_ends="",
                parameter="<arg_key>",
                key_ends=re.compile(r"</arg_key>\s*<arg_value>"),
                key_end_written="</arg_key>\n<arg_value>",
                value_ends="</arg_value>",
                closes="",
            ),
            opens=("<tool_call>",),
            closes="</tool_call>",
            several=False,
            written=("<tool_call>", "\n", "</tool_call>"),
            example=("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ),
        ToolFormat(
            "granite",
            JsonCalls(as_list=True),
            opens=("<|tool_call|>", "<tool_call>"),
            closes="</tool_call>",
            written=("<|tool_call|>[", ", ", "]"),
            example='<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]',
        ),
        ToolFormat(
            "granite-20b-fc",
            _JSON,
            opens=("<function_call>",),
            several=False,
            written=("<function_call> ", "\n", ""),
            example='<function_call> {"name": "f", "arguments": {"a": 1}}',
        ),
        ToolFormat(
            "kimi_k2",
            HeadedCalls(
                opens="<|tool_call_begin|>",
                header=re.compile(
                    r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s{:]+):\d+)\s*"
                    r"<\|tool_call_argument_begin\|>\s*"
                ),
                written="functions.{name}:{index}<|tool_call_argument_begin|>",
                closes="<|tool_call_end|>",
            ),
            opens=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
            closes="<|tool_calls_section_end|>",
            in_reasoning=True,
            id_form="header",
            written=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
            example=(
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
                '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
            ),
        ),
        ToolFormat(
            "minimax",
            _JSON,
            opens=("<tool_calls>",),
            closes="</tool_calls>",
            written=("<tool_calls>\n", "\n", "\n</tool_calls>"),
            example='<tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n</tool_calls>',
        ),
        ToolFormat(
            "minimax_m2",
            TaggedCalls(
                opens='<invoke name="',
                name_ends='">',
                parameter='<parameter name="',
                key_ends=re.compile('">'),
                key_end_written='">',
                value_ends="</parameter>",
                closes="</invoke>",
            ),
            opens=("<minimax:tool_call>",),
            closes="</minimax:tool_call>",
            written=("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),
            example=(
                '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n'
                "</invoke>\n</minimax:tool_call>"
            ),
        ),
    )
}
TOOL_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "llama4_json": "llama3_json",
    "glm47": "glm45",
    "granite4": "hermes",
    "minimax_m1": "minimax",
}
TOOL_PARSER_NAMES = tuple(sorted((*TOOL_FORMATS, *TOOL_ALIASES, HARMONY.name)))


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How a model writes its messages.

    Attributes:
        channels: harmony, which writes both in channels; `tools` and `reasoning` are None then.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    channels: Channels | None = None

    @property
    def words(self) -> str:
        """For people."""
        if self.channels is not None:
            return f"tool calls and reasoning {self.channels.name}"
        tools = "none" if self.tools is None else self.tools.name
        reasoning = "none" if self.reasoning is None else self.reasoning.name
        return f"tool calls {tools}, reasoning {reasoning}"

    @property
    def calls_tools(self) -> bool:
        return self.tools is not None or self.channels is not None

    @property
    def reasons(self) -> bool:
        return self.reasoning is not None or self.channels is not None


def named_format(tools: str | None, reasoning: str | None) -> MessageFormat:
    """The format of these names, which have to be known; None: without."""
    if tools == HARMONY.name or reasoning in HARMONY_NAMES:
        return MessageFormat(channels=HARMONY)
    return MessageFormat(
        None if tools is None else TOOL_FORMATS[TOOL_ALIASES.get(tools, tools)],
        None if reasoning is None else reasoning_format(reasoning),
    )
