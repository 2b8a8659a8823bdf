"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from hetero_llm.core.errors import shown
from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.server import protocol as wire
from hetero_llm.server.context import Context
from hetero_llm.server.errors import empty, invalid, required, wrong
from hetero_llm.server.logprobs import CompletionLogprobWriter, prompt_logprobs
from hetero_llm.server.request_parsing import (
    CheckedRequest,
    TokenLimit,
    check_max_tokens,
    checked_request,
    completion_logprobs,
    prompt_cut,
    read_generation,
    sampling_params,
)
from hetero_llm.server.response_builder import ChunkBuilder
from hetero_llm.server.responses import Handler, Responses
from hetero_llm.server.settings import Limits
from hetero_llm.server.tokenization import ApiTokenizer, Cut, plain_ids

_OBJECT = "text_completion"


def completions_endpoint(context: Context, responses: Responses) -> Handler:
    """The handler of the route."""

    async def completions(request: Request) -> Response:
        body = await read_generation(context, request, wire.CompletionRequest)
        checked = await _checked(context, request, body)
        builder = _CompletionBuilder(context, body, checked)
        return await responses.send(request, checked, builder, streamed=bool(body.stream))

    return completions


async def _checked(
    context: Context, request: Request, body: wire.CompletionRequest
) -> CheckedRequest:
    check_max_tokens(body.max_tokens, "max_tokens", lowest=0 if body.echo else 1)
    # Even to generate nothing the engine takes a step, which ends with a token.
    wanted = 1 if body.max_tokens == 0 else body.max_tokens
    defaults = context.client.info.default_sampling
    default = defaults.get("max_tokens", context.settings.default_max_tokens)
    limit = TokenLimit(wanted, default)
    params = sampling_params(context, body, limit, defaults=defaults)
    parsed = _parsed_prompts(body.prompt, context.settings.limits)
    _check_fan_out(len(parsed), params.width, context.settings.limits)
    prompts = await _prompts(body, parsed, context.tokenizer, cut=prompt_cut(body, params))
    return checked_request(context, request, body, prompts, params, prefix="cmpl-", limit=limit)


def _parsed_prompts(value: Any, limits: Limits) -> list[str | list[int]]:
    """A text, token ids, or a list of either.

    Raises:
        ApiError: anything else, an empty list, or too many.
    """
    if value is None:
        raise required("prompt")
    if isinstance(value, str):
        return [value]
    if not value:
        raise empty("prompt")
    if type(value[0]) is int:
        _check_ids(value, "prompt")
        return [value]
    if len(value) > limits.prompts:
        raise wrong("prompt", f"{len(value)} prompts, at most {limits.prompts} a request")
    for index, item in enumerate(value):
        if isinstance(item, list):
            if not item:
                raise invalid("prompt", f"prompt[{index}] must not be empty")
            _check_ids(item, f"prompt[{index}]")
        elif not isinstance(item, str):
            message = f"prompt[{index}]={shown(item)}: must be a text or a list of token ids"
            raise invalid("prompt", message, "invalid_type")
    return value


def _check_ids(ids: list[Any], where: str) -> None:
    if plain_ids(ids):
        return
    other = next(item for item in ids if type(item) is not int)
    message = f"{where}: holds {shown(other)}; token ids are integers"
    raise invalid("prompt", message, "invalid_type")


async def _prompts(
    request: wire.CompletionRequest,
    parsed: Sequence[str | list[int]],
    tokenizer: ApiTokenizer,
    *,
    cut: Cut,
) -> list[Prompt]:
    """Parsed prompts with those of their token ids that `cut` keeps.

    Raises:
        ApiError: a text is empty, or cannot fit.
    """
    special = request.add_special_tokens is not False
    prompts = []
    for item in parsed:
        if not isinstance(item, str):
            prompts.append(Prompt(None, cut.apply(item)))
            continue
        ids = await tokenizer.encode(
            item, add_special_tokens=special, truncated=cut.count is not None
        )
        kept = cut.apply(ids)
        prompts.append(Prompt(item if len(kept) == len(ids) else None, kept))
    return prompts


def _check_fan_out(prompts: int, width: int, limits: Limits) -> None:
    if prompts * width > limits.sequences:
        raise wrong(
            "n",
            f"{prompts} prompts with {width} sequences each are {prompts * width}, "
            f"at most {limits.sequences} are accepted",
        )


class _CompletionBuilder(ChunkBuilder[wire.CompletionRequest]):
    """Builds the response to one request. Choices are numbered by prompt, then by sequence."""

    def __init__(
        self, context: Context, body: wire.CompletionRequest, request: CheckedRequest
    ) -> None:
        super().__init__(context, body, request)
        self._logprobs: dict[int, CompletionLogprobWriter] = {}
        self._started: set[int] = set()

    async def whole(self) -> wire.Completion:
        choices = []
        async for index, output in self._outputs():
            self._counter.note(index, output, output.outputs)
            if output.finished:
                choices += [self._chunk_choice(index, output, one) for one in output.outputs]
        choices.sort(key=lambda choice: choice.index)
        request = self._request
        return wire.Completion(
            request.id, _OBJECT, request.created, request.model, choices, self._counter.usage()
        )

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        outputs = self._engine_requests.outputs()
        return _without_tokens(outputs) if self._body.max_tokens == 0 else outputs

    def _shows_text_only(self) -> bool:
        body = self._body
        return completion_logprobs(body) is None and not (body.echo or body.return_token_ids)

    def _number(self, index: int, one: CompletionOutput) -> int:
        return index * self._request.params[index].n + one.index

    def _text_choice(self, number: int, text: str) -> wire.CompletionChoice:
        return wire.CompletionChoice(number, text, None, None, None)

    def _chunk_choice(
        self, index: int, output: RequestOutput, one: CompletionOutput
    ) -> wire.CompletionChoice:
        body, prompt = self._body, self._request.prompts[index]
        number = self._number(index, one)
        first = number not in self._started
        self._started.add(number)
        logprobs = self._write_logprobs(number, first, prompt, output, one)
        text = one.text
        if first and body.echo:
            text = self._prompt_text(prompt) + text
        reason = self._engine_requests.deadline.reason(one.finish_reason)
        choice = wire.CompletionChoice(
            number, text, logprobs, reason, one.stop_reason, timeout=self._timeout(one)
        )
        if body.return_token_ids:
            choice.token_ids = one.token_ids
            if first:
                choice.prompt_token_ids = list(prompt.token_ids or ())
        if not body.stream:
            asked = body.prompt_logprobs is not None
            choice.prompt_logprobs = prompt_logprobs(
                self._tokenizer, output.prompt_logprobs if asked else None, as_ids=self._as_ids
            )
        return choice

    def _write_logprobs(
        self,
        number: int,
        first: bool,
        prompt: Prompt,
        output: RequestOutput,
        one: CompletionOutput,
    ) -> wire.CompletionLogprobs | None:
        body = self._body
        wanted = completion_logprobs(body)
        if wanted is None:
            return None
        writer = self._logprobs.get(number)
        if writer is None:
            writer = self._logprobs[number] = CompletionLogprobWriter(
                self._tokenizer,
                count=self._alternatives(wanted),
                as_ids=self._as_ids,
                skip_special_tokens=body.skip_special_tokens is not False,
            )
        written = None
        if first and body.echo:
            written = writer.write(
                prompt.token_ids or (),
                output.prompt_logprobs or (),
                shown_in=self._prompt_text(prompt),
            )
        return writer.write(one.token_ids, one.logprobs or (), into=written)

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids or (), skip_special_tokens=False)

    def _chunk(
        self, choices: Sequence[wire.CompletionChoice], usage: wire.Usage | UnsetType | None
    ) -> wire.CompletionChunk:
        request = self._request
        return wire.CompletionChunk(
            request.id,
            _OBJECT,
            request.created,
            request.model,
            list(choices),
            usage if isinstance(usage, wire.Usage) else None,
        )


async def _without_tokens(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Takes the one generated token out of the outputs of a request for no tokens."""
    async with aclosing(outputs):
        async for index, output in outputs:
            for one in output.outputs:
                one.text, one.token_ids, one.logprobs = "", [], []
                one.finish_reason = one.finish_reason and "length"
                one.stop_reason = None
            yield index, output
