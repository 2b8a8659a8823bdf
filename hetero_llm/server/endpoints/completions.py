"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.engine.input_processor import Prompt
from hetero_llm.server.context import Context
from hetero_llm.server.engine_requests import Deadline
from hetero_llm.server.errors import invalid
from hetero_llm.server.logprobs import CompletionLogprobWriter, prompt_logprobs
from hetero_llm.server.prompts import completion_prompts, parse_prompts
from hetero_llm.server.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from hetero_llm.server.response_builder import AnswerWriter
from hetero_llm.server.responses import Work, make_work, send_answer, take_in
from hetero_llm.server.sampling import check_max_tokens, sampling_params
from hetero_llm.server.settings import Limits

_OBJECT = "text_completion"


def completions_endpoint(context: Context) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The handler of the route."""

    async def completions(request: Request) -> Response:
        body = await take_in(context, request, CompletionRequest)
        work = await _work(context, request, body)
        writer = _Writer(context, body, work)
        return await send_answer(context, request, work, writer, streamed=bool(body.stream))

    return completions


async def _work(context: Context, request: Request, body: CompletionRequest) -> Work:
    check_max_tokens(body.max_tokens, "max_tokens", lowest=0 if body.echo else 1)
    # With nothing to generate the engine still takes a step that ends with a token.
    wanted = 1 if body.max_tokens == 0 else body.max_tokens
    default = context.settings.default_max_tokens
    params = sampling_params(body, max_tokens=default if wanted is None else wanted)
    parsed = parse_prompts(body.prompt, context.settings.limits)
    _check_fan_out(len(parsed), params.width, context.settings.limits)
    prompts = await completion_prompts(body, parsed, context.texts)
    return make_work(
        context,
        request,
        body,
        prompts,
        params,
        prefix="cmpl",
        wanted=wanted,
        default=default,
        name="max_tokens",
    )


def _check_fan_out(prompts: int, width: int, limits: Limits) -> None:
    if prompts * width > limits.sequences:
        raise invalid(
            "n",
            f"n: {prompts} prompts with {width} sequences each are {prompts * width}, "
            f"at most {limits.sequences} are accepted",
        )


class _Writer(AnswerWriter[CompletionRequest]):
    """Makes the answer of one request. A choice's number counts prompts, then their sequences."""

    def __init__(self, context: Context, body: CompletionRequest, work: Work) -> None:
        super().__init__(context, body, work)
        self._logprobs: dict[int, CompletionLogprobWriter] = {}
        self._begun: set[int] = set()

    async def whole(self) -> Completion:
        choices = []
        async for index, output in self._outputs():
            self._counter.note(index, output, output.outputs)
            if output.finished:
                choices += [self._chunk_choice(index, output, one) for one in output.outputs]
        choices.sort(key=lambda choice: choice.index)
        return self._chunk(choices, self._counter.usage())

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        outputs = self._run.outputs()
        return _without_tokens(outputs) if self._body.max_tokens == 0 else outputs

    def _chunk_choice(
        self, index: int, output: RequestOutput, one: CompletionOutput
    ) -> CompletionChoice:
        body, prompt = self._body, self._work.prompts[index]
        number = index * self._work.params[index].n + one.index
        first = number not in self._begun
        self._begun.add(number)
        logprobs = self._write_logprobs(number, first, prompt, output, one)
        text = one.text
        if first and body.echo:
            text = self._prompt_text(prompt) + text
        choice = CompletionChoice(
            number, text, logprobs, self._deadline.reason(one.finish_reason), one.stop_reason
        )
        if self._deadline.cut(one.finish_reason):
            choice.timeout = True
        if body.return_token_ids:
            choice.token_ids = one.token_ids
            if first:
                choice.prompt_token_ids = list(prompt.token_ids or ())
        if body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(
                self._texts, output.prompt_logprobs, as_ids=self._as_ids
            )
        return choice

    def _write_logprobs(
        self,
        number: int,
        first: bool,
        prompt: Prompt,
        output: RequestOutput,
        one: CompletionOutput,
    ) -> CompletionLogprobs | None:
        body = self._body
        if body.logprobs is None:
            return None
        writer = self._logprobs.get(number)
        if writer is None:
            writer = self._logprobs[number] = CompletionLogprobWriter(
                self._texts,
                count=body.logprobs,
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
        skip = self._body.skip_special_tokens is not False
        return self._texts.decode(prompt.token_ids or (), skip_special_tokens=skip)

    @property
    def _deadline(self) -> Deadline:
        return self._run.deadline

    def _chunk(
        self, choices: Sequence[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        """The whole answer has this form, too."""
        work = self._work
        return Completion(work.id, _OBJECT, work.created, work.model, list(choices), usage)


async def _without_tokens(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of a request for none, though the engine has generated one token."""
    async with aclosing(outputs):
        async for index, output in outputs:
            for one in output.outputs:
                one.text, one.token_ids, one.logprobs = "", [], []
                one.finish_reason = one.finish_reason and "length"
                one.stop_reason = None
            yield index, output
