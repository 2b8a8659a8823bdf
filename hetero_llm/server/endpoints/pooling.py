"""POST /v1/embeddings, /rerank, /score, /classify and /pooling: the routes of models that pool."""

from __future__ import annotations

import asyncio
import logging
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from hetero_llm.core.errors import (
    shown,
)
from hetero_llm.core.pooling import Finish, PoolingInput, PoolingResult
from hetero_llm.core.pooling_params import CLASSIFY, EMBED, SCORE, PoolingParams
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.engine.pooling.pooling_inputs import PoolingInputs
from hetero_llm.engine.pooling.score_pairs import pair_up, score_of_vectors
from hetero_llm.server import pooling_protocol as wire
from hetero_llm.server.context import Context, request_id_of
from hetero_llm.server.errors import (
    ApiError,
    empty,
    invalid,
    required,
    too_many,
    unsupported,
    wrong,
    wrong_value,
)
from hetero_llm.server.metrics import NEVER_BEGUN
from hetero_llm.server.request_parsing import (
    answer_ids,
    as_json,
    deadline_seconds,
    read_known,
    short_text,
    wanted_rank,
)
from hetero_llm.server.responses import Handler, whole_response
from hetero_llm.server.tokenization import plain_ids

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=wire.PoolingFields)

_FORMATS = ("float", "base64")
_NUMBERS_AT_ONCE = 1 << 15
"""Numbers written as text before the event loop gets its turn: some 5 ms."""
_LOGGED_INPUTS = 16
_SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))


class PoolingEndpoints:
    """The handlers of one server; `handlers`: by their routes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.handlers: dict[str, Handler] = {
            "/v1/embeddings": self.embeddings,
            "/v1/rerank": self.rerank,
            "/v1/score": self.score,
            "/classify": self.classify,
            "/pooling": self.pooling,
        }

    async def embeddings(self, request: Request) -> Response:
        body = await self._read(request, wire.EmbeddingRequest)
        to_json = _format_of(body.encoding_format)
        call = _Call(self._context, request, body, "embd")

        async def work() -> msgspec.Struct:
            inputs, vectors = await call.vectors(body.input, EMBED, to_json)
            data = [wire.Embedding(i, one) for i, one in enumerate(vectors)]
            return wire.Embeddings(call.id, call.created, call.model, data, _usage(inputs))

        return await whole_response(self._context, request, work())

    async def pooling(self, request: Request) -> Response:
        body = await self._read(request, wire.PoolingRequest)
        to_json = _format_of(body.encoding_format)
        call = _Call(self._context, request, body, "pool")
        task = PoolingParams(task=body.task).task or call.inputs.model.tasks[0]

        async def work() -> msgspec.Struct:
            inputs, vectors = await call.vectors(body.input, task, to_json)
            data = [wire.Pooling(i, one) for i, one in enumerate(vectors)]
            return wire.Poolings(call.id, call.created, call.model, data, _usage(inputs))

        return await whole_response(self._context, request, work())

    async def classify(self, request: Request) -> Response:
        body = await self._read(request, wire.ClassifyRequest)
        call = _Call(self._context, request, body, "classify")

        async def work() -> msgspec.Struct:
            inputs, values = await call.pool(body.input, CLASSIFY)
            labels = call.inputs.model.labels
            data = [
                wire.Classification(i, labels[int(one.argmax())], one.tolist(), len(one))
                for i, one in enumerate(values)
            ]
            return wire.Classifications(call.id, call.created, call.model, data, _usage(inputs))

        return await whole_response(self._context, request, work())

    async def score(self, request: Request) -> Response:
        body = await self._read(request, wire.ScoreRequest)
        first_name, second_name = _sides_of(body)
        call = _Call(self._context, request, body, "score")

        async def work() -> msgspec.Struct:
            limit = self._context.settings.limits.pooling_inputs
            first = _texts(getattr(body, first_name), first_name, limit)
            second = _texts(getattr(body, second_name), second_name, limit)
            scores, tokens = await call.scores(first, second, (first_name, second_name))
            data = [wire.Score(i, one) for i, one in enumerate(scores)]
            return wire.Scores(
                call.id, call.created, call.model, data, wire.PoolingUsage(tokens, tokens)
            )

        return await whole_response(self._context, request, work())

    async def rerank(self, request: Request) -> Response:
        body = await self._read(request, wire.RerankRequest)
        call = _Call(self._context, request, body, "rerank")
        if body.query is None:
            raise required("query")
        if body.top_n is not None and body.top_n < 0:
            raise wrong_value("top_n", body.top_n, "must be at least 0, which is all")
        query = body.query

        async def work() -> msgspec.Struct:
            limit = self._context.settings.limits.pooling_inputs
            texts = _documents(body.documents, limit)
            scores, tokens = await call.scores([query], texts, ("query", "documents"))
            results = [wire.RerankResult(i, one) for i, one in enumerate(scores)]
            if body.return_documents is not False:
                for result, text in zip(results, texts, strict=True):
                    result.document = wire.RerankDocument(text)
            results.sort(key=lambda one: -one.relevance_score)
            usage = wire.PoolingUsage(tokens, tokens)
            return wire.Reranked(call.id, call.model, usage, results[: body.top_n or None])

        return await whole_response(self._context, request, work())

    async def _read(self, request: Request, kind: type[K]) -> K:
        """Reads a body and makes the checks that need no tokenizer."""
        context = self._context
        body = await read_known(context, request, kind)
        if context.client.info.pooling is None:
            reason = (
                f"the model {context.names[0]!r} generates text and does not pool; serve an "
                "embedding model, or this one with --runner pooling"
            )
            raise invalid("model", reason, "unsupported_task")
        for name, feature in wire.UNAVAILABLE.items():
            if getattr(body, name, None) not in (None, []):
                raise unsupported(name, feature)
        if body.priority:
            raise unsupported("priority", "priority scheduling")
        if getattr(body, "embed_dtype", None) not in (None, "float32"):
            raise unsupported("embed_dtype", "another type of vectors than float32")
        if getattr(body, "endianness", None) not in (None, "native", "little"):
            raise unsupported("endianness", "another order of bytes than little-endian")
        short_text("request_id", body.request_id, context.settings.limits.request_id_chars)
        return body


class _Call:
    """One request: its name in the answer, and the way of its texts through the engine."""

    def __init__(
        self, context: Context, request: Request, body: wire.PoolingFields, prefix: str
    ) -> None:
        inputs = context.client.pooling_inputs
        assert inputs is not None
        self._context = context
        self._body = body
        self._http_id = request_id_of(request)
        self._seconds = deadline_seconds(request, context.settings.request_timeout)
        self._rank = wanted_rank(request, context.client.info.num_replicas)
        self.inputs: PoolingInputs = inputs
        self.id, self._engine_id = answer_ids(request, body.request_id, f"{prefix}-")
        self.created = int(time.time())
        self.model = context.model_name(body.model)

    async def pool(
        self, given: Any, task: str
    ) -> tuple[Sequence[PoolingInput], Sequence[np.ndarray]]:
        """The inputs of a request's field `input`, and their pooled values.

        Raises:
            ApiError, RequestError: the input or a parameter is wrong.
        """
        params = self._params(task)
        finish = self.inputs.finish_of(params, task)
        prompts = _prompts(given, self._context.settings.limits.pooling_inputs)
        several = isinstance(given, list) and type(given[0]) is not int
        inputs = await self._inputs(prompts, params, "input", several=several)
        return inputs, (await self._run(inputs, finish, task)).values

    async def vectors(
        self, given: Any, task: str, to_json: Callable[[np.ndarray], bytes]
    ) -> tuple[Sequence[PoolingInput], list[msgspec.Raw]]:
        """As `pool`, with the values as JSON; the event loop gets its turn after some of them."""
        inputs, values = await self.pool(given, task)
        made, written = [], 0
        for one in values:
            made.append(msgspec.Raw(to_json(one)))
            written += len(one)
            if written >= _NUMBERS_AT_ONCE:
                written = 0
                await asyncio.sleep(0)
        return inputs, made

    async def scores(
        self, first: Sequence[str], second: Sequence[str], names: tuple[str, str]
    ) -> tuple[list[float], int]:
        """The score of each pair, and the number of tokens that were computed.

        Args:
            names: of the two fields that hold the texts.

        Raises:
            ApiError, RequestError: a text or a parameter is wrong.
        """
        params = self._params(SCORE)
        finish = self.inputs.finish_of(params, SCORE)
        pairs = pair_up(len(first), len(second), *names)
        if not self.inputs.model.is_classifier:
            inputs = []
            for name, texts in zip(names, (first, second), strict=True):
                prompts = [Prompt(text) for text in texts]
                inputs += await self._inputs(prompts, params, name, several=len(texts) > 1)
            result = await self._run(inputs, finish, SCORE)
            vectors = score_of_vectors(inputs, result.values, pairs, len(first))
            return [score for score, _ in vectors], _tokens(inputs)
        both = [(first[one], second[other]) for one, other in pairs]
        for pair in both:
            self._check_length(len(pair[0]) + len(pair[1]), params, names[1])
        special = self._body.add_special_tokens is not False
        made = await self._in_thread(
            lambda: self.inputs.pairs(
                both, params, name_index=len(second) > 1, field=names[1],
                add_special_tokens=special,
            ),
            sum(len(pair[0]) + len(pair[1]) for pair in both),
        )  # fmt: skip
        result = await self._run(made, finish, SCORE)
        return [float(one[0]) for one in result.values], _tokens(made)

    def _params(self, task: str) -> PoolingParams:
        body = self._body
        return PoolingParams(
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side,
            use_activation=body.use_activation,
            activation=body.activation,
            dimensions=getattr(body, "dimensions", None),
            normalize=getattr(body, "normalize", None),
            prompt_name=getattr(body, "prompt_name", None),
            task=task,
        )

    async def _inputs(
        self, prompts: Sequence[Prompt], params: PoolingParams, field: str, *, several: bool
    ) -> list[PoolingInput]:
        size = 0
        for prompt in prompts:
            if prompt.text is not None:
                self._check_length(len(prompt.text), params, field)
            size += len(prompt.text or "") + len(prompt.token_ids or ())
        special = self._body.add_special_tokens is not False
        return await self._in_thread(
            lambda: self.inputs.prompts(
                prompts, [params] * len(prompts), name_index=several, field=field,
                add_special_tokens=special,
            ),
            size,
        )  # fmt: skip

    def _check_length(self, chars: int, params: PoolingParams, field: str) -> None:
        """Refuses a text of several contexts before it is tokenized. One alone would be too strict:
        white space may become no token at all."""
        if self._context.client.tokenizer is None or params.truncate_prompt_tokens is not None:
            return
        try:
            self._context.tokenizer.check_length(chars, truncated=True, param=field)
        except ApiError:
            longest = self.inputs.model.max_model_len
            text = f"{field}: {chars} characters are more than {longest} tokens, the model's limit"
            hint = "truncate_prompt_tokens=-1 cuts it"
            raise invalid(field, f"{text}; {hint}", "context_length_exceeded") from None

    def _in_thread(
        self, work: Callable[[], list[PoolingInput]], size: int
    ) -> Awaitable[list[PoolingInput]]:
        return self._context.client.threads.run(work, size=size)

    async def _run(
        self, inputs: Sequence[PoolingInput], finish: Finish, task: str
    ) -> PoolingResult:
        context, arrival, tokens = self._context, time.monotonic(), _tokens(inputs)
        if context.settings.log_requests:
            asyncio.get_running_loop().call_soon(self._log, inputs, task, tokens)
        metrics = context.metrics
        with context.answering(self._engine_id):
            try:
                async with asyncio.timeout(self._seconds):
                    result = await context.client.pool(
                        self._engine_id, inputs, finish, data_parallel_rank=self._rank
                    )
            except TimeoutError:
                metrics.aborted("timeout")
                metrics.pooled(tokens, arrival, reason="abort")
                text = f"there was no result within {self._seconds:g} s"
                raise ApiError(504, "request_timeout", text) from None
            except NEVER_BEGUN:
                raise
            except asyncio.CancelledError:
                metrics.pooled(tokens, arrival, reason="abort")
                raise
            except Exception:
                metrics.pooled(tokens, arrival, reason="error")
                raise
        metrics.pooled(tokens, arrival, reason="stop", scheduled=result.scheduled)
        return result

    def _log(self, inputs: Sequence[PoolingInput], task: str, tokens: int) -> None:
        settings = self._context.settings
        logger.info(
            "request %s: %s, %s, %d input(s) of %d tokens",
            self._http_id, as_json(self.id), task, len(inputs), tokens,
        )  # fmt: skip
        if settings.log_prompts and settings.max_log_len != 0:
            for one in inputs[:_LOGGED_INPUTS]:
                ids = one.token_ids[: settings.max_log_len].tolist()
                logger.info("request %s: input %s", self._http_id, as_json(ids))


def _tokens(inputs: Sequence[PoolingInput]) -> int:
    return sum(map(len, inputs))


def _usage(inputs: Sequence[PoolingInput]) -> wire.PoolingUsage:
    tokens = _tokens(inputs)
    return wire.PoolingUsage(tokens, tokens)


# -- fields of requests ---------------------------------------------------------------------


def _prompts(given: Any, limit: int) -> list[Prompt]:
    """The prompts of `input`: a text, token ids, or a list of those."""
    if given is None:
        raise required("input")
    if isinstance(given, str):
        return [Prompt(given)]
    _check_count("input", given, limit)
    if type(given[0]) is int:
        return [_token_prompt(given, "input")]
    return [
        Prompt(one) if isinstance(one, str) else _token_prompt(one, f"input[{place}]")
        for place, one in enumerate(given)
    ]


def _token_prompt(ids: Any, where: str) -> Prompt:
    if not plain_ids(ids):
        kind = "a text or a list of token ids"
        raise wrong(where, f"must be {kind}", "invalid_type")
    if not ids:
        raise empty(where)
    return Prompt(token_ids=ids)


def _texts(given: Any, name: str, limit: int) -> list[str]:
    if isinstance(given, str):
        return [given]
    _check_count(name, given, limit)
    for place, one in enumerate(given):
        if not isinstance(one, str):
            raise wrong(f"{name}[{place}]", "must be a text", "invalid_type")
    return list(given)


def _documents(given: Any, limit: int) -> list[str]:
    """Texts, or objects with a text, as Jina and Cohere take them."""
    if given is None:
        raise required("documents")
    _check_count("documents", given, limit)
    texts = [one.get("text") if isinstance(one, dict) else one for one in given]
    return _texts(texts, "documents", limit)


def _check_count(name: str, given: Sequence[Any], limit: int) -> None:
    ids = name == "input" and given and type(given[0]) is int
    if not given:
        raise empty(name)
    if len(given) > limit and not ids:
        raise too_many(name, f"{len(given)} entries", limit)


def _sides_of(body: wire.ScoreRequest) -> tuple[str, str]:
    """The names of the two fields that the request has."""
    given = [name for pair in _SIDES for name in pair if getattr(body, name) is not None]
    for pair in _SIDES:
        if tuple(given) == pair:
            return pair
    if not given:
        raise invalid("text_1", "text_1 and text_2 are required", "missing_required_parameter")
    known = "; ".join(" and ".join(pair) for pair in _SIDES)
    raise wrong(given[0], f"send one of these pairs of fields: {known}")


# -- values of responses --------------------------------------------------------------------


def _format_of(wanted: str | None) -> Callable[[np.ndarray], bytes]:
    if wanted not in (None, *_FORMATS):
        reason = f"encoding_format={shown(wanted)}: must be 'float' or 'base64'"
        raise invalid("encoding_format", reason)
    return _as_base64 if wanted == "base64" else _as_numbers


def _as_numbers(values: np.ndarray) -> bytes:
    return msgspec.json.encode(values.tolist())


def _as_base64(values: np.ndarray) -> bytes:
    return b'"' + b64encode(values.astype("<f4").tobytes()) + b'"'
