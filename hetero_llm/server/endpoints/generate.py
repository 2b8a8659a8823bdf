"""POST /generate, the endpoint of vLLM's first server (`vllm.entrypoints.api_server`).

Its clients send the fields of `SamplingParams` beside a prompt and get texts that begin with the
prompt; in a stream each JSON object has the whole texts so far and ends with a NUL byte.
"""

from __future__ import annotations

from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.server.context import Context
from hetero_llm.server.errors import required
from hetero_llm.server.protocol import Generated, GenerateRequest
from hetero_llm.server.request_parsing import (
    CheckedRequest,
    TokenLimit,
    check_max_tokens,
    checked_request,
    prompt_cut,
    read_generation,
    sampling_params,
)
from hetero_llm.server.response_builder import ResponseBuilder, Send, deltas
from hetero_llm.server.responses import ENDED_BY_NUL, Handler, Responses


def generate_endpoint(context: Context, responses: Responses) -> Handler:
    """The handler of the route."""

    async def generate(request: Request) -> Response:
        body = await read_generation(context, request, GenerateRequest)
        checked = await _checked(context, request, body)
        builder = _TextBuilder(context, body, checked)
        return await responses.send(
            request, checked, builder, streamed=bool(body.stream), framing=ENDED_BY_NUL
        )

    return generate


async def _checked(context: Context, request: Request, body: GenerateRequest) -> CheckedRequest:
    if body.prompt is None:
        raise required("prompt")
    check_max_tokens(body.max_tokens, "max_tokens", lowest=1)
    limit = TokenLimit(body.max_tokens, context.settings.default_max_tokens)
    params = sampling_params(context, body, limit)
    cut = prompt_cut(body, params)
    token_ids = await context.tokenizer.encode(
        body.prompt,
        add_special_tokens=body.add_special_tokens is not False,
        truncated=cut.count is not None,
    )
    prompt = Prompt(body.prompt if cut.count is None else None, cut.apply(token_ids))
    return checked_request(context, request, body, [prompt], params, prefix="gen-", limit=limit)


class _TextBuilder(ResponseBuilder[GenerateRequest]):
    """Builds the texts of one prompt's sequences."""

    async def whole(self) -> Generated:
        texts = self._prompts()
        async for _, output in self._outputs():
            if output.finished:
                for one in output.outputs:
                    texts[one.index] += one.text
        return Generated(texts)

    async def stream(self, send: Send) -> None:
        texts = self._prompts()
        found = deltas(self._outputs(), self._stream_interval)
        async with aclosing(found):
            async for _, _, one in found:
                texts[one.index] += one.text
                await send(Generated(texts))

    def _prompts(self) -> list[str]:
        return [self._body.prompt or ""] * self._request.params[0].n
