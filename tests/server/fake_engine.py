"""An engine client without an engine: it echoes the tokens of prompts, and misbehaves on request.

Requests are checked by the real `InputProcessor`, so their mistakes are the real ones.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from hetero_llm.core.errors import (
    AdapterError,
    DuplicateRequestError,
    EngineDeadError,
    EngineHungError,
    OverloadedError,
)
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.demo_models import demo_folder
from hetero_llm.engine.engine_client import EngineInfo, EngineStats
from hetero_llm.engine.inputs.input_processor import InputProcessor, Prompt
from hetero_llm.engine.text.detokenizer import TextStream
from hetero_llm.engine.text.stop_strings import find_stop, num_undecided
from hetero_llm.engine.text.tokenizer import Tokenizer, TokenizerThreads, load_tokenizer
from hetero_llm.structured_output.compiler import GrammarCompiler

VOCAB, CONTEXT, EOS = 4096, 2048, 0
Script = Callable[[list[int], int, int], int]
"""(prompt ids, number of the sequence, position) to the token generated there."""


def echo(prompt: list[int], sequence: int, position: int) -> int:
    return prompt[(position + sequence) % len(prompt)]


def demo_tokenizer() -> Tokenizer:
    return load_tokenizer(demo_folder("demo"), mode="auto", trust_remote_code=False)


def logprobs_of(tokenizer: Tokenizer | None, token: int, count: int) -> TokenLogprobs:
    """`count` alternatives, the likeliest first, of which the token itself is the second."""
    order = [(token + 1) % VOCAB, token] + [(token + 2 + i) % VOCAB for i in range(count)]
    ranked = {
        other: Logprob(-0.5 * rank, rank, tokenizer.decode_token(other) if tokenizer else None)
        for rank, other in enumerate(order, start=1)
        if rank <= count or other == token
    }
    return {token: ranked[token]} | ranked


@dataclass
class _Sequence:
    index: int
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    sent_tokens: int = 0
    sent_chars: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


# large: one attribute for each way in which it can misbehave.
class FakeEngine:
    """See the module.

    Attributes:
        delay: seconds before each token.
        unpaused: no token is generated while it is cleared.
        die_after: the engine dies after this many tokens of a request.
        fail_after: a request fails after this many.
        max_queue: more running requests are refused.
        silent_above: a request for more tokens gets one, and then none until it is aborted.
        seen: arguments of `generate`, in order.
        aborted: ids of the requests that were closed or aborted before their end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        script: Script = echo,
        delay: float = 0.0,
        die_after: int | None = None,
        fail_after: int | None = None,
        max_queue: int | None = None,
        silent_above: int | None = None,
        max_logprobs: int = 20,
        vocab_size: int = VOCAB,
    ) -> None:
        self._tokenizer = tokenizer
        self.images = None
        self.threads = TokenizerThreads()
        self._inputs = InputProcessor(
            tokenizer,
            vocab_size=vocab_size,
            max_model_len=CONTEXT,
            eos_ids=(EOS,),
            max_logprobs=max_logprobs,
            seed=0,
            grammars=tokenizer and GrammarCompiler(tokenizer.vocabulary(vocab_size, (EOS,))),
        )
        self.script = script
        self.delay = delay
        self.unpaused = asyncio.Event()
        self.unpaused.set()
        self.die_after = die_after
        self.fail_after = fail_after
        self.max_queue = max_queue
        self.silent_above = silent_above
        self.seen: list[tuple[str, Prompt, SamplingParams]] = []
        self.aborted: list[str] = []
        self.dead = self.hung = False
        self.num_steps = self.generated = self.finished = self.num_resets = 0
        self.info = EngineInfo(
            model="demo",
            served_names=("demo",),
            max_model_len=CONTEXT,
            vocab_size=vocab_size,
            num_blocks=512,
            block_size=16,
            device="cpu",
            dtype="bfloat16",
            backend="fake",
            max_logprobs=max_logprobs,
        )
        self.adapters: list[LoRARequest | None] = []  # of `generate`, in order
        self.loras: dict[int, LoRARequest] = {}  # that were added and not removed
        self.prompt_adapters: list[PromptAdapterRequest | None] = []  # of `generate`, in order
        self.ranks: list[int | None] = []  # of `generate`, in order
        self.opened: list[PromptAdapterRequest] = []
        self._live: dict[str, asyncio.Event] = {}
        self._stop_by = math.inf

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.check_health()
        self.adapters.append(lora_request)
        self.prompt_adapters.append(prompt_adapter_request)
        self.ranks.append(data_parallel_rank)
        if request_id in self._live:
            raise DuplicateRequestError(request_id)
        if self.max_queue is not None and len(self._live) >= self.max_queue:
            raise OverloadedError(2.5)
        request = self._inputs.make_request(request_id, prompt, sampling_params)
        self.seen.append((request_id, prompt, sampling_params))
        ended = self._live[request_id] = asyncio.Event()
        complete = False
        try:
            async for output in self._outputs(request, ended):
                yield output
                complete = output.finished
        finally:
            del self._live[request_id]
            if not complete:
                self.aborted.append(request_id)
            self.finished += 1

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        if "broken" in lora_request.lora_path:
            raise AdapterError("use_dora", True, "DoRA is not available yet")
        self.loras[lora_request.lora_int_id] = lora_request
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        return self.loras.pop(lora_id, None) is not None

    async def add_prompt_adapter(self, request: PromptAdapterRequest) -> None:
        self.opened.append(request)

    async def num_virtual_tokens(self, path: str) -> int:
        if "broken" in path:
            raise AdapterError("peft_type", "LORA", "no prompt adapter")
        return 5

    async def _outputs(
        self, request: Request, ended: asyncio.Event
    ) -> AsyncGenerator[RequestOutput, None]:
        params, ids = request.params, request.prompt_token_ids
        sequences = [self._sequence(index, request) for index in range(params.n)]
        times = RequestMetrics(time.monotonic())
        position = 0
        while any(sequence.finish_reason is None for sequence in sequences):
            await self._wait(ended)
            if position == 1 and self._is_silent(params):
                await ended.wait()
            if self.dead or position == self.die_after:
                self.dead = True
                raise EngineDeadError("the fake engine was told to die at 0x7f00deadbeef")
            if position == self.fail_after:
                yield RequestOutput(request.request_id, None, ids, None, [], True, error="secret")
                return
            now = time.monotonic()
            if not ended.is_set():
                times.first_scheduled_time = times.first_scheduled_time or now
                times.first_token_time = times.first_token_time or now
                times.last_token_time = now
            for sequence in sequences:
                self._advance(sequence, request, position, aborted=ended.is_set())
            position += 1
            done = all(sequence.finish_reason for sequence in sequences)
            if params.output_kind is RequestOutputKind.DELTA or done:
                yield RequestOutput(
                    request_id=request.request_id,
                    prompt=None,
                    prompt_token_ids=ids,
                    prompt_logprobs=self._prompt_logprobs(request),
                    outputs=[
                        self._completion(sequence, params)
                        for sequence in sequences
                        if sequence.sent_tokens >= 0
                    ],
                    finished=done,
                    metrics=times,
                )

    async def _wait(self, ended: asyncio.Event) -> None:
        """Until the next token is due, or the request is aborted."""
        waits = [asyncio.ensure_future(ended.wait()), asyncio.ensure_future(self.unpaused.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.delay and not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), self.delay)
        self.num_steps += 1

    def _is_silent(self, params: SamplingParams) -> bool:
        wanted = params.max_tokens
        return self.silent_above is not None and (wanted is None or wanted > self.silent_above)

    def _sequence(self, index: int, request: Request) -> _Sequence:
        stream = None
        if self._tokenizer is not None and request.params.detokenize:
            stream = self._tokenizer.decode_stream(
                request.prompt_token_ids, skip_special_tokens=request.params.skip_special_tokens
            )
        return _Sequence(index, stream)

    def _advance(self, sequence: _Sequence, request: Request, position: int, aborted: bool) -> None:
        if sequence.finish_reason is not None:
            return
        if aborted:
            sequence.finish_reason = "abort"
            return
        token = self.script(request.prompt_token_ids, sequence.index, position)
        sequence.tokens.append(token)
        self.generated += 1
        ends = token in request.end_ids
        if sequence.stream is not None and not ends:
            new = sequence.stream.push(token)
            sequence.text += new
            stopped = find_stop(sequence.text, len(new), request.params)
            if stopped is not None:
                sequence.stop_reason, length = stopped
                sequence.text = sequence.text[:length]
        if ends or sequence.stop_reason is not None:
            sequence.finish_reason = "stop"
            if token in (request.params.stop_token_ids or ()):
                sequence.stop_reason = token
        elif len(request.prompt_token_ids) + len(sequence.tokens) >= request.max_total_tokens:
            sequence.finish_reason = "length"

    def _completion(self, sequence: _Sequence, params: SamplingParams) -> CompletionOutput:
        first = sequence.sent_tokens
        tokens = sequence.tokens[first:]
        ended = sequence.finish_reason is not None
        held = 0 if ended else num_undecided(sequence.text, params.stop or ())
        shown = len(sequence.text) - held
        text = sequence.text[sequence.sent_chars : shown]
        if params.output_kind is RequestOutputKind.DELTA:
            sequence.sent_tokens = -1 if ended else len(sequence.tokens)
            sequence.sent_chars = shown
        logprobs = None
        if params.logprobs is not None:
            logprobs = [logprobs_of(self._tokenizer, token, params.logprobs) for token in tokens]
        return CompletionOutput(
            sequence.index, text, tokens, None, logprobs, sequence.finish_reason,
            sequence.stop_reason,
        )  # fmt: skip

    def _prompt_logprobs(self, request: Request) -> list[TokenLogprobs | None] | None:
        count = request.params.prompt_logprobs
        if count is None:
            return None
        rest = request.prompt_token_ids[1:]
        return [None, *(logprobs_of(self._tokenizer, token, count) for token in rest)]

    async def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._live[request_id].set()

    def stats(self) -> EngineStats:
        metrics = {
            "num_requests_running": len(self._live),
            "num_requests_waiting": 0,
            "num_requests_finished": self.finished,
            "num_preemptions": 0,
            "num_steps": self.num_steps,
            "prefix_cache_queries": 0,
            "prefix_cache_hits": 0,
            "prompt_tokens": sum(len(prompt.token_ids or ()) for _, prompt, _ in self.seen),
            "generation_tokens": self.generated,
            "kv_cache_usage_perc": 0.25,
            "spec_decode_num_drafts": 3,
            "spec_decode_num_draft_tokens": 9,
            "spec_decode_num_accepted_tokens": 6,
            "global_average_hit_len": 0.75,
        }
        age = math.inf if self.hung else 0.01
        return EngineStats(metrics, self.num_steps, age, len(self._live))

    def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError("the fake engine is dead, see /var/log/engine/trace.log")
        if self.hung:
            raise EngineHungError("no life for 30 s")

    async def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    async def shutdown(self, drain_seconds: float) -> None:
        self._stop_by = min(self._stop_by, time.monotonic() + drain_seconds)
        while self._live and time.monotonic() < self._stop_by:
            await asyncio.sleep(0.002)
        self.dead = True
        for ended in self._live.values():
            ended.set()
