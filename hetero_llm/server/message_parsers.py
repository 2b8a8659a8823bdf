"""The parsers of a model's messages: which format the model writes, and one parser a message."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hetero_llm.core.errors import ConfigError
from hetero_llm.core.reasoning_formats import HARMONY_ANSWER, OFF
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.structured_outputs import StructuredOutputsParams
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.server.errors import invalid, wrong
from hetero_llm.server.message_events import MessageParser, PlainParser
from hetero_llm.server.protocol import ChatRequest
from hetero_llm.server.regions.detection import detected_format
from hetero_llm.server.regions.formats import MessageFormat, named_format
from hetero_llm.server.regions.region_parser import RegionParser
from hetero_llm.server.regions.response_template import translated
from hetero_llm.server.regions.special_tokens import SpecialTokens, Start
from hetero_llm.server.regions.tool_grammar import (
    GrammarFunction,
    SchemaError,
    ToolGrammar,
    tool_grammar,
    written_texts,
)
from hetero_llm.server.settings import Limits
from hetero_llm.server.tokenization import ApiTokenizer
from hetero_llm.server.tool_requests import NO_TOOLS, ToolRequest, checked_tools

logger = logging.getLogger(__name__)

_SHORTEST_MARKER = 4
"""Characters; shorter added tokens, such as runs of spaces, are text."""


class MessageParsers:
    """Makes the parsers of all messages of one model.

    Args:
        tool_parser: name of the format of tool calls; None: that of the chat template.
        reasoning_parser: name of the format of reasoning; None: that of the chat template.
        needs_tools: --enable-auto-tool-choice was given.
        in_reasoning: constraints hold for reasoning, too.

    Attributes:
        tokenizer: of the model.
        format: of the model's messages.

    Raises:
        ConfigError: no format of tool calls was found, though one is needed.
    """

    def __init__(
        self,
        tokenizer: ApiTokenizer,
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        needs_tools: bool = False,
        in_reasoning: bool = False,
    ) -> None:
        self._in_reasoning = in_reasoning
        self.tokenizer = tokenizer
        self.format = _format(tokenizer, tool_parser, reasoning_parser)
        if needs_tools and not self.format.calls_tools:
            raise ConfigError(
                "enable_auto_tool_choice",
                True,
                "the chat template shows no known format of tool calls; name it with "
                "--tool-call-parser",
            )
        self._reasons = self.format.reasons
        texts = tokenizer.added_tokens
        written = written_texts(self.format)
        self._written_ids = {
            text: index
            for text, index in texts.items()
            if text in written and len(text) >= _SHORTEST_MARKER
        }
        self._marker_ids = {one: texts[one] for one in markers_of(self.format) if one in texts}
        self._special = {
            index: text for text, index in tokenizer.special_tokens.items() if text not in written
        }

    def requested(self, body: ChatRequest, limits: Limits) -> ToolRequest:
        """The tools of a request to generate.

        Raises:
            ApiError: a field is wrong, or this model cannot be asked to call tools.
        """
        if body.tools is None and body.tool_choice is None:
            return NO_TOOLS
        tools = checked_tools(
            body.tools, body.tool_choice, limits, parallel=body.parallel_tool_calls
        )
        if tools.is_on and not self.format.calls_tools:
            raise wrong(
                "tools",
                "the format of this model's tool calls is not known; the server's "
                "operator names it with --tool-call-parser; tool_choice 'none' is "
                "accepted",
                "unsupported_parameter",
            )
        return tools

    def constrained(
        self, params: SamplingParams, tools: ToolRequest, prompt: Prompt
    ) -> SamplingParams:
        """The parameters with what the answer must follow, which reasoning may precede: the grammar
        of tools that have to be called or are strict, the request's own constraint, or, if the
        model is free to call tools, either of them. A message that has to consist of calls has no
        answer that the request's own constraint could hold for.

        Raises:
            ApiError: the grammar cannot be made, or the two cannot be one.
        """
        own = params.structured_outputs
        if own is None and not tools.is_on:
            return params
        if own is not None and tools.is_on and tools.choice == "auto":
            return replace(params, structured_outputs=self._calls_or(own, tools, prompt))
        grammar = self.grammar(tools, prompt)
        if grammar is not None:
            return replace(params, structured_outputs=grammar.constraint())
        if own is None:
            return params
        return replace(params, structured_outputs=self._behind_reasoning(own, prompt))

    def _calls_or(
        self, own: StructuredOutputsParams, tools: ToolRequest, prompt: Prompt
    ) -> StructuredOutputsParams:
        """The constraint of a message that either calls tools or is an answer in the request's own
        form, which reasoning may precede.

        Raises:
            ApiError: the two cannot be one grammar.
        """
        # Harmony's calls have a channel of their own, and a structural tag may describe them.
        if self.format.channels is not None or own.structural_tag is not None:
            if tools.needs_grammar:
                raise invalid(
                    "response_format",
                    "response_format and the like: a constraint of this kind is not available "
                    "with strict tools of this model",
                    "unsupported_parameter",
                )
            return self._behind_reasoning(own, prompt)
        calls = self._grammar(replace(self.format, reasoning=None), tools, "content", required=True)
        return self._behind_reasoning(calls.constraint_or(own), prompt)

    def _behind_reasoning(
        self, constraint: StructuredOutputsParams, prompt: Prompt
    ) -> StructuredOutputsParams:
        """The constraint of an answer before which the model may reason: it begins behind the token
        that ends reasoning, where the model has one. A constraint with `begins_after` stays as it
        is."""
        if constraint.begins_after is not None:
            return constraint
        if self._in_reasoning:
            return replace(constraint, begins_after=())  # which leaves the engine no choice
        if self.format.channels is not None:
            return replace(constraint, begins_after=self.tokenizer.token_ids(HARMONY_ANSWER))
        if self.format.reasoning is None:
            return constraint
        start = self.format.reasoning.answer_start(prompt.text or "", self._marker_ids)
        return replace(
            constraint, begins_after=start.begins_after, may_begin_with=start.may_begin_with
        )

    def sampling(self, params: SamplingParams, tools: ToolRequest) -> SamplingParams:
        """The parameters for the engine: a parser needs special tokens in its text."""
        if not self._parses(tools) or not params.detokenize or not params.skip_special_tokens:
            return params
        return replace(params, skip_special_tokens=False)

    def new(
        self, prompt: Prompt, tools: ToolRequest, params: SamplingParams, *, skip_special: bool
    ) -> MessageParser:
        """A parser for one message.

        Args:
            params: as the engine has them.
            skip_special: leave special tokens that mark nothing out of texts.
        """
        if not self._parses(tools) or not params.detokenize:
            return PlainParser()
        tokens = SpecialTokens(
            self._marker_ids, self._special if skip_special else {}, self._decode
        )
        return RegionParser(
            self.format,
            self.start(prompt),
            schemas=tools.schemas if tools.is_on else None,
            tokens=tokens,
            only_one_call=not tools.parallel,
        )

    def grammar(self, tools: ToolRequest, prompt: Prompt) -> ToolGrammar | None:
        """The grammar of the answer to a prompt, for tools that need one.

        Raises:
            ApiError: a tool's schema cannot be made a grammar; it names the part of the schema.
        """
        if not tools.needs_grammar:
            return None
        found, reasoning = self.format, self.format.reasoning
        if reasoning is not None and reasoning.is_closed_behind(prompt.text or ""):
            found = replace(found, reasoning=None)
        return self._grammar(found, tools, self.start(prompt), required=tools.choice != "auto")

    def _grammar(
        self, message_format: MessageFormat, tools: ToolRequest, start: Start, *, required: bool
    ) -> ToolGrammar:
        try:
            return tool_grammar(
                message_format,
                functions_of(tools),
                self._written_ids,
                start,
                required=required,
                parallel=tools.parallel and tools.choice != "named",
            )
        except SchemaError as error:
            where = error.field
            raise wrong(where, str(error), "unsupported_parameter") from None

    def start(self, prompt: Prompt) -> Start:
        """The region that the prompt leaves open."""
        text = (prompt.text or "").rstrip()
        channels, reasoning = self.format.channels, self.format.reasoning
        if channels is not None:
            return "header" if text.endswith(f"{channels.part}assistant") else "content"
        if reasoning is None:
            return "content"
        return "reasoning" if reasoning.is_open_behind(text) else "content"

    def _parses(self, tools: ToolRequest) -> bool:
        return self._reasons or tools.is_on

    def _decode(self, token_ids: Any) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def functions_of(tools: ToolRequest) -> list[GrammarFunction]:
    """The functions that the answer may call."""
    found = []
    for index, tool in enumerate(tools.tools):
        function = tool["function"]
        if tools.name is not None and function["name"] != tools.name:
            continue
        strict = function.get("strict") is True
        schema = function.get("parameters") or {}
        free = tools.choice == "auto" and not strict
        parameters, field = None if free else schema, f"tools[{index}].function.parameters"
        found.append(GrammarFunction(function["name"], parameters, field, strict))
    return found


def _format(
    tokenizer: ApiTokenizer, tool_parser: str | None, reasoning_parser: str | None
) -> MessageFormat:
    """The format by the names given; where none is, by the tokenizer's response template, and what
    that leaves open by the chat template."""
    template = tokenizer.chat_template
    found = MessageFormat() if template is None else detected_format(template.text)
    described = tokenizer.response_template
    if described is not None and (tool_parser is None or reasoning_parser is None):
        found = _described(described, found)
    given = named_format(_known(tool_parser), _known(reasoning_parser))
    if given.channels is not None:
        return given
    if found.channels is not None:
        return found if tool_parser is None and reasoning_parser is None else given
    return MessageFormat(
        found.tools if tool_parser is None else given.tools,
        found.reasoning if reasoning_parser is None else given.reasoning,
    )


def _described(template: Any, found: MessageFormat) -> MessageFormat:
    """The format of a response template; what it does not say is as it was `found`."""
    translation = translated(template)
    for problem in translation.problems:
        logger.warning("the tokenizer's response_template is not used for %s", problem)
    by_template = translation.format
    if by_template.channels is not None:
        return by_template
    if found.channels is not None:
        return by_template if by_template.calls_tools and by_template.reasons else found
    return MessageFormat(by_template.tools or found.tools, by_template.reasoning or found.reasoning)


def _known(name: str | None) -> str | None:
    return None if name == OFF else name


def markers_of(message_format: MessageFormat) -> Iterable[str]:
    """All markers of a format."""
    channels = message_format.channels
    if channels is not None:
        yield from (channels.part, channels.channel, channels.message, *channels.ends)
    if message_format.tools is not None:
        yield from message_format.tools.opens
        if message_format.tools.closes:
            yield message_format.tools.closes
        body = message_format.tools.body
        for name in ("opens", "closes"):
            marker = getattr(body, name, "")
            if marker:
                yield marker
    if message_format.reasoning is not None:
        yield from message_format.reasoning.opens
        yield from message_format.reasoning.closes
