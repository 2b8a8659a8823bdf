"""The parsers of a model: which format, where a message begins, special tokens of each format."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import llguidance
import llguidance.hf
import pytest
from tokenizers import AddedToken

from hetero_llm.core.reasoning_formats import REASONING_FORMATS
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.structured_outputs import StructuredOutputsParams, ToolOutputParams
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.engine.text.tokenizer import Tokenizer, TokenizerThreads
from hetero_llm.server.errors import ApiError
from hetero_llm.server.message_events import PlainParser
from hetero_llm.server.message_parsers import MessageParsers
from hetero_llm.server.regions.formats import HARMONY, TOOL_FORMATS
from hetero_llm.server.regions.tool_grammar import written_texts
from hetero_llm.server.settings import Limits
from hetero_llm.server.tokenization import ApiTokenizer
from hetero_llm.server.tool_requests import NO_TOOLS, ToolRequest, checked_tools
from hetero_llm.structured_output.grammar_text import constraint_grammar
from tests.server.regions.reading_aloud import Said

FUNCTION: dict[str, Any] = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": FUNCTION}]
AUTO = ToolRequest(tuple(TOOLS), "auto")
STRICT = ToolRequest(({"type": "function", "function": {**FUNCTION, "strict": True}},), "auto")
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
EXAMPLES = {name: one.example for name, one in TOOL_FORMATS.items()} | {"openai": CALL}


SPECIAL_OF_HARMONY = (
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip


def compiled(params: SamplingParams) -> str:
    """llguidance's text of what the output of a request must follow."""
    assert params.structured_outputs is not None
    return constraint_grammar(params.structured_outputs, {}).text


def accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the text is an output, and may end."""
    matcher = llguidance.LLMatcher(llguidance.hf.from_tokenizer(tokenizer.hf), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def with_special(tokenizer: Tokenizer, special: tuple[str, ...]) -> Tokenizer:
    hf = copy.deepcopy(tokenizer.hf)
    hf.add_special_tokens(
        {"additional_special_tokens": [AddedToken(one, normalized=False) for one in special]}
    )
    return Tokenizer(hf)


def parsers(
    tokenizer: Tokenizer, template: str = "", *, special: tuple[str, ...] = (), **options: Any
) -> MessageParsers:
    hf = with_special(tokenizer, special).hf
    hf.response_template = options.pop("response_template", None)
    api = ApiTokenizer(
        Tokenizer(hf), TokenizerThreads(), max_model_len=2048, chat_template=template or "x"
    )
    return MessageParsers(api, **options)


@pytest.mark.parametrize("name", EXAMPLES)
def test_all_markup_may_be_special_tokens(tokenizer: Tokenizer, name: str) -> None:
    """Special tokens that mark nothing are left out; those of the markup have to stay."""
    found = parsers(tokenizer, tool_parser=name)
    special = tuple(
        dict.fromkeys(
            re.findall(r"<[|｜/]?[\w▁:]+[|｜]?>|\[[A-Z_]+\]", written_texts(found.format))
        )
    )
    found = parsers(tokenizer, tool_parser=name, special=(*special, "<|im_end|>"))
    ids = found.tokenizer.require("a").encode(
        EXAMPLES[name] + "<|im_end|>", add_special_tokens=False
    )
    params = found.sampling(SamplingParams(), AUTO)
    assert not params.skip_special_tokens
    prompt = Prompt("<|start|>assistant", [5])
    for pieces in ([ids], [[one] for one in ids]):
        parser, message = found.new(prompt, AUTO, params, skip_special=True), Said()
        for piece in pieces:
            text = found.tokenizer.decode(piece, skip_special_tokens=False)
            for event in parser.feed(text, piece):
                message.note(event)
        for event in parser.finish():
            message.note(event)
        assert message.content == ""
        assert message.calls[0] == ["f", '{"a": 1}', True]


@pytest.mark.parametrize(
    ("name", "end", "start"),
    [
        ("qwen3", "<|im_start|>assistant\n", "content"),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "reasoning"),
        ("qwen3", "<think> is what?<|im_start|>assistant\n", "content"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "content"),
        ("deepseek_r1", "<｜Assistant｜>", "reasoning"),
        ("deepseek_r1", "<｜Assistant｜><think>\n", "reasoning"),
        ("deepseek_r1", "<｜Assistant｜><think>\n\n</think>\n\n", "content"),
        ("mistral", "[/INST]", "content"),
        ("harmony", "<|start|>assistant", "header"),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>So", "content"),
        ("none", "<think>", "content"),
    ],
)
def test_where_a_message_begins(tokenizer: Tokenizer, name: str, end: str, start: str) -> None:
    found = parsers(tokenizer, reasoning_parser=name)
    assert found.start(Prompt("# user: hi\n" + end, [5])) == start


def test_flags_go_before_what_is_found(tokenizer: Tokenizer) -> None:
    template = "<tool_call>{{ c }}</tool_call></think>"
    found = parsers(tokenizer, template).format
    assert found.tools is TOOL_FORMATS["hermes"] and found.reasoning is REASONING_FORMATS["qwen3"]
    found = parsers(tokenizer, template, tool_parser="mistral").format
    assert found.tools is TOOL_FORMATS["mistral"] and found.reasoning is REASONING_FORMATS["qwen3"]
    found = parsers(tokenizer, template, reasoning_parser="none").format
    assert found.tools is TOOL_FORMATS["hermes"] and found.reasoning is None
    found = parsers(tokenizer, template, tool_parser="openai").format
    assert found.channels is HARMONY
    harmony = "<|channel|>analysis<|message|>"
    assert parsers(tokenizer, harmony).format.channels is HARMONY
    found = parsers(tokenizer, harmony, tool_parser="hermes").format
    assert found.channels is None and found.tools is TOOL_FORMATS["hermes"]


def test_response_templates_go_before_chat_templates(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    fields: dict[str, Any] = {
        "thinking": {"open": "<mull>", "close": "</mull>", "content": "text"},
        "tool_calls": {"open_pattern": "<a|b>", "close": "</a>", "content": "json"},
    }
    with caplog.at_level(logging.WARNING):
        found = parsers(
            tokenizer, "<tool_call></think>", response_template={"fields": fields}
        ).format
    assert found.reasoning is not None and found.reasoning.opens == ("<mull>",)
    assert found.tools is TOOL_FORMATS["hermes"]
    assert "response_template is not used for tool_calls" in caplog.text
    assert (
        parsers(tokenizer, tool_parser="openai").format.words == "tool calls and reasoning openai"
    )
    assert found.words == "tool calls hermes, reasoning response_template"
    given = parsers(
        tokenizer, response_template={"fields": fields}, reasoning_parser="qwen3"
    ).format
    assert given.reasoning is REASONING_FORMATS["qwen3"]


def test_what_needs_no_parser_gets_none(tokenizer: Tokenizer) -> None:
    prompt, params = Prompt("a", [5]), SamplingParams()
    found = parsers(tokenizer, tool_parser="hermes")
    assert found.sampling(params, NO_TOOLS) is params
    for tools in (NO_TOOLS, ToolRequest(tuple(TOOLS), "none")):
        assert isinstance(found.new(prompt, tools, params, skip_special=True), PlainParser)
    bare = SamplingParams(detokenize=False)
    assert found.sampling(bare, AUTO) is bare
    assert isinstance(found.new(prompt, AUTO, bare, skip_special=True), PlainParser)


def test_grammars(tokenizer: Tokenizer) -> None:
    found, prompt = parsers(tokenizer, tool_parser="qwen3_coder"), Prompt("a", [5])
    assert found.grammar(AUTO, prompt) is None
    required = found.grammar(ToolRequest(tuple(TOOLS), "required"), prompt)
    named = found.grammar(ToolRequest(tuple(TOOLS), "named", "f"), prompt)
    assert required is not None and named is not None and "<function=f>" in named.lark
    choice = {"type": "function", "function": {"name": "g"}}
    tools = checked_tools(
        [*TOOLS, {"type": "function", "function": {"name": "g"}}], choice, Limits()
    )
    grammar = found.grammar(tools, prompt)
    assert grammar is not None and "<function=g>" in grammar.lark
    assert "<function=f>" not in grammar.lark
    limited = {"name": "f", "strict": True,
               "parameters": {"properties": {"a": {"type": "string", "pattern": "x"}}}}  # fmt: skip
    strict = checked_tools([{"type": "function", "function": limited}], None, Limits())
    with pytest.raises(ApiError) as caught:
        found.grammar(strict, prompt)
    assert caught.value.param == "tools[0].function.parameters.properties.a.pattern"
    counted = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    more = [*TOOLS, {"type": "function", "function": {"name": "g", "parameters": counted}}]
    grammar = found.grammar(checked_tools(more, "required", Limits()), prompt)
    assert grammar is not None  # a text has tags around it, and needs no schema
    fields = {one.field for one in grammar.constraint().schemas.values()}
    assert f"tools[{len(TOOLS)}].function.parameters.properties.a" in fields
    assert f"tools[{len(TOOLS)}].function.parameters.properties.b" not in fields


@pytest.mark.parametrize("in_reasoning", [False, True])
def test_constraints_may_hold_for_reasoning_too(tokenizer: Tokenizer, in_reasoning: bool) -> None:
    found = parsers(
        tokenizer,
        special=("<think>", "</think>"),
        reasoning_parser="deepseek_r1",
        in_reasoning=in_reasoning,
    )
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    constraint = found.constrained(params, NO_TOOLS, Prompt("a", [5])).structured_outputs
    assert constraint is not None
    closes = found.tokenizer.added_tokens["</think>"]
    assert tuple(constraint.begins_after or ()) == (() if in_reasoning else (closes,))
    assert constraint.begins_after is not None  # the engine has nothing left to decide


def test_the_grammar_after_reasoning_that_the_prompt_has_closed(tokenizer: Tokenizer) -> None:
    """No second reasoning comes before the calls that the model has to write."""
    found = parsers(tokenizer, tool_parser="hermes", reasoning_parser="qwen3")
    required = ToolRequest(tuple(TOOLS), "required")
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for end, may_reason in ("<think>\n\n</think>\n\n", False), ("assistant:", True):
        params = found.constrained(SamplingParams(), required, Prompt(f"a {end}", [5]))
        grammar = compiled(params)
        assert accepts(tokenizer, grammar, call)
        assert accepts(tokenizer, grammar, f"<think>a</think>\n{call}") == may_reason


ANSWERS: list[tuple[dict[str, Any], str, str]] = [
    ({"json": {"type": "object", "required": ["b"]}}, '{"b": 2}', "{}"),
    ({"json": '{"type": "integer"}'}, "7", '"7"'),
    ({"json_object": True}, "{}", "7"),
    ({"regex": "[ab]+"}, "abba", "abc"),
    ({"choice": ["yes", "no"]}, "no", "nobody"),
    ({"grammar": 'start: "x" | "y"'}, "y", "xy"),
]


@pytest.mark.parametrize(("own", "right", "wrong"), ANSWERS)
@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>")])
def test_a_model_that_is_free_to_call_answers_in_the_requests_form(
    tokenizer: Tokenizer, own: dict[str, Any], right: str, wrong: str, special: tuple[str, ...]
) -> None:
    """With strict tools, whether or not markers are tokens."""
    tokenizer = with_special(tokenizer, special)
    found = parsers(tokenizer, tool_parser="hermes")
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**own))
    grammar = compiled(found.constrained(params, STRICT, Prompt("a", [5])))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert accepts(tokenizer, grammar, call) and accepts(tokenizer, grammar, right)
    assert not accepts(tokenizer, grammar, wrong)
    assert not accepts(tokenizer, grammar, f"{call}{right}")
    assert not accepts(tokenizer, grammar, call.replace("1", '"one"'))
    free = compiled(found.constrained(params, AUTO, Prompt("a", [5])))
    assert accepts(tokenizer, free, call.replace("1", '"one"'))
    assert accepts(tokenizer, free, right) and not accepts(tokenizer, free, wrong)
    # Where a call has to come, or without tools, there is nothing to choose.
    required = ToolRequest(tuple(TOOLS), "required")
    only_calls = compiled(found.constrained(params, required, Prompt("a", [5])))
    assert accepts(tokenizer, only_calls, call) and not accepts(tokenizer, only_calls, right)
    assert found.constrained(params, NO_TOOLS, Prompt("a", [5])) == params


def test_constraints_that_tools_cannot_stand_beside(tokenizer: Tokenizer) -> None:
    """A structural tag may describe calls itself: with tools that are free it is all that holds."""
    tag = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=tag))
    found, prompt = parsers(tokenizer, tool_parser="hermes"), Prompt("a", [5])
    assert found.constrained(params, AUTO, prompt) == params
    with pytest.raises(ApiError, match="not available with strict tools of this model"):
        found.constrained(params, STRICT, prompt)
    # Where the request says itself behind which tokens its constraint begins, both begin there.
    own = StructuredOutputsParams(json_object=True, begins_after=[7], may_begin_with=6)
    both = found.constrained(SamplingParams(structured_outputs=own), AUTO, prompt)
    constraint = both.structured_outputs
    assert isinstance(constraint, ToolOutputParams) and constraint.answer is not None
    assert (list(constraint.begins_after or ()), constraint.may_begin_with) == ([7], 6)


def test_harmony_answers_in_its_own_channel(tokenizer: Tokenizer) -> None:
    """Calls have another channel, so an answer's form leaves them free; strict ones are not."""
    found = parsers(tokenizer, tool_parser="openai", special=SPECIAL_OF_HARMONY)
    own = StructuredOutputsParams(json_object=True)
    params = SamplingParams(structured_outputs=own)
    prompt = Prompt("<|start|>assistant", [5])
    both = found.constrained(params, AUTO, prompt).structured_outputs
    assert both is not None and both.json_object
    final = "<|channel|>final<|message|>"
    assert list(both.begins_after or ()) == list(found.tokenizer.token_ids(final))
    with pytest.raises(ApiError, match="not available with strict tools of this model"):
        found.constrained(params, STRICT, prompt)
