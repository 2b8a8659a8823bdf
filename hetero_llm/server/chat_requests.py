"""What the three APIs of conversations (chat completions, responses, messages) share: from a
`ChatRequest` that has passed `check_generation` to tokenized prompt and parser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request

from hetero_llm.core.sampling_params import RequestOutputKind
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.server.context import Context
from hetero_llm.server.errors import wrong_value
from hetero_llm.server.message_events import MessageParser, PlainParser
from hetero_llm.server.message_reader import CountsReasoning
from hetero_llm.server.prompts import chat_prompt
from hetero_llm.server.protocol import ChatRequest
from hetero_llm.server.request_parsing import (
    CheckedRequest,
    check_max_tokens,
    checked_request,
    prompt_cut,
    sampling_params,
)
from hetero_llm.server.tokenization import WHOLE, Cut
from hetero_llm.server.tool_requests import ToolRequest


@dataclass(frozen=True, slots=True)
class CheckedChat:
    """A conversation that is ready for the engine.

    Attributes:
        new_parser: makes the parser of one message that answers it.
    """

    request: CheckedRequest
    new_parser: Callable[[], MessageParser]


async def checked_chat(
    context: Context,
    request: Request,
    body: ChatRequest,
    *,
    prefix: str,
    cut_max_tokens: bool = False,
) -> CheckedChat:
    """Renders and tokenizes the conversation and makes the checks that need its length.

    Args:
        prefix: of the response's id, with what separates it.
        cut_max_tokens: lower the tokens to generate to what the context has room for, instead of
            refusing the request.

    Raises:
        ApiError: the conversation is wrong, or does not fit.
        SamplingError: a field is out of range or contradicts another one.
    """
    tools = context.parsers.requested(body, context.settings.limits)
    wanted, name = _max_tokens(body)
    defaults = context.client.info.default_sampling
    default = defaults.get("max_tokens")
    if cut_max_tokens and wanted is not None:
        wanted, default = None, wanted
    params = sampling_params(
        body,
        max_tokens=default if wanted is None else wanted,
        max_model_len=context.client.info.max_model_len,
        limits=context.settings.limits,
        defaults=defaults,
    )
    prompt = await conversation_prompt(context, body, tools, cut=prompt_cut(body, params))
    params = context.parsers.constrained(params, tools, prompt)
    checked = checked_request(
        context,
        request,
        body,
        [prompt],
        context.parsers.sampling(params, tools),
        prefix=prefix,
        wanted=wanted,
        default=default,
        name=name,
    )
    return CheckedChat(checked, partial(message_parser, context, body, checked, tools))


async def conversation_prompt(
    context: Context, body: ChatRequest, tools: ToolRequest, *, cut: Cut = WHOLE
) -> Prompt:
    """The prompt of a conversation; `cut` says which of its tokens are kept.

    Raises:
        ApiError: a message is wrong, the template refuses it, or it cannot fit.
    """
    return await chat_prompt(
        body,
        context.tokenizer,
        context.settings,
        add_special_tokens=bool(body.add_special_tokens),
        cut=cut,
        tools=tools.tools,
    )


def message_parser(
    context: Context, body: ChatRequest, checked: CheckedRequest, tools: ToolRequest
) -> MessageParser:
    """A new parser for one message that answers this conversation."""
    return context.parsers.new(
        checked.prompts[0],
        tools,
        checked.params[0],
        skip_special=body.skip_special_tokens is not False,
    )


def read_by_deltas(checked: CheckedRequest, parser: MessageParser) -> CheckedRequest:
    """The request with outputs that come as deltas, also for a whole response: only then is it
    known which tokens are reasoning. A message that is all content needs no deltas, nor does a
    parser that counts them itself."""
    if isinstance(parser, (PlainParser, CountsReasoning)):
        return checked
    kind = RequestOutputKind.DELTA
    return replace(checked, params=[replace(one, output_kind=kind) for one in checked.params])


def _max_tokens(body: ChatRequest) -> tuple[int | None, str]:
    """The limit, and the name of the field that sets it: OpenAI has a new and an old one."""
    old, new = body.max_tokens, body.max_completion_tokens
    check_max_tokens(old, "max_tokens", lowest=1)
    check_max_tokens(new, "max_completion_tokens", lowest=1)
    if old is not None and new is not None and old != new:
        reason = f"contradicts max_completion_tokens={new}; send one"
        raise wrong_value("max_tokens", old, reason)
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")
