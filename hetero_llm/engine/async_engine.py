"""`AsyncLLMEngine`: many requests at once from an event loop, the engine in its own process.

Everything here runs in the event loop's thread, except that long prompts are tokenized in others.
Neither the event loop nor the engine ever waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import signal
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import (
    AdapterError,
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    HeteroLLMError,
    OverloadedError,
    PoolingError,
    RequestError,
    refuse_later,
)
from hetero_llm.core.inputs import PromptType
from hetero_llm.core.lora import AdapterRef, LoRARequest, check_lora_request
from hetero_llm.core.metrics import Metric
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.pooling import Finish, PoolingInput, PoolingRequest, PoolingResult
from hetero_llm.core.pooling_outputs import PoolingOutput, PoolingRequestOutput
from hetero_llm.core.pooling_params import PoolingParams
from hetero_llm.core.prompt_adapter import PromptAdapterRequest, check_prompt_adapter_request
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from hetero_llm.engine.engine_client import EngineInfo, EngineStats, ModelInfo, PoolingInfo
from hetero_llm.engine.finish_rate import FinishRate
from hetero_llm.engine.inputs.images import ImageInputs
from hetero_llm.engine.inputs.input_processor import InputProcessor, Prompt, parse_prompt
from hetero_llm.engine.inputs.prompt_adapters import open_prompt_adapters
from hetero_llm.engine.metric_objects import metric_objects
from hetero_llm.engine.pooling.pooling_inputs import PoolingInputs
from hetero_llm.engine.processes import messages
from hetero_llm.engine.processes.engine_launcher import EngineProcess, launch
from hetero_llm.engine.processes.output_stream import Assembler, OutputStream
from hetero_llm.engine.processes.replica import (
    Replica,
    merge_figures,
    merge_histograms,
    name_of,
    places,
    wait_until_ready,
)
from hetero_llm.engine.processes.replica_choice import (
    PIECE_BYTES,
    ReplicaChooser,
    piece_hashes,
)
from hetero_llm.engine.resolve import open_model
from hetero_llm.engine.text.tokenizer import Tokenizer, TokenizerThreads, open_grammars
from hetero_llm.engine.vllm_missing import refuse_options, why_missing
from hetero_llm.models.folders import is_hub_id
from hetero_llm.pooling.pooling_model import PoolingModel

logger = logging.getLogger(__name__)

STEP_TIMEOUTS = {"cuda": 30.0, "cpu": 120.0}
"""Seconds without a message after which an engine counts as hung, by device."""
_IDS_PER_CHARACTER = 8
"""Token ids that are checked in the time in which one character is encoded."""
_CONSTRAINT_CHARACTERS = 4096
"""A long constraint is written, and any is compiled, in the time in which a text of this length is
encoded, or longer."""
_TOKEN_BYTES = 4  # of a prompt's packed token ids
_MOST_INDEXED = 2
"""Pieces remembered of a replica, by those that its KV cache on the device has room for."""
_SECONDS_TO_STOP = 1.5
_POLL_SECONDS = 0.01


class _Checked:
    """What a check returns that may be awaited, though it is done."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


# large: one owner, in one thread, of the processes, all streams and the engine's health.
class AsyncLLMEngine:
    """An `EngineClient` whose engine is a process of its own, started and ended by this object; or
    several such processes (`data_parallel_size`), of which each request gets the one that
    `replica_choice` finds. They live and die together.

    Use it from one event loop at a time. The constructor blocks until the model is loaded; inside
    a running loop call it through `asyncio.to_thread`.

    Args:
        engine_args: `AsyncEngineArgs`, or the arguments by name; see docs/flags.md.
        served_names: names of the model for clients; none means `served_model_name`, or its own.
        max_queued_requests: most requests that wait, besides the `max_num_seqs` that run.
        step_timeout: seconds without a message after which the engine counts as hung; None means
            30 on a GPU, 120 on a CPU. It has to be longer than the longest step.
        check_tokenizer: called with the model's tokenizer, or None without one, long before the
            weights are loaded; what it raises ends the start.

    Raises:
        ConfigError: an argument is wrong.
        ModelLoadError: the model cannot be loaded.
        EngineDeadError: the engine's process ended during the start.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None
    images: ImageInputs | None
    pooling_inputs: PoolingInputs | None

    # large: what the parent keeps of the engine process, one name each.
    def __init__(
        self,
        engine_args: EngineArgs | Mapping[str, Any],
        *,
        served_names: Sequence[str] = (),
        max_queued_requests: int = 1024,
        step_timeout: float | None = None,
        check_tokenizer: Callable[[Tokenizer | None], None] | None = None,
    ) -> None:
        begun = time.monotonic()
        if not isinstance(engine_args, EngineArgs):
            engine_args = AsyncEngineArgs(**engine_args)
        if type(max_queued_requests) is not int or max_queued_requests < 0:
            reason = "must be an integer of at least 0"
            raise ConfigError("max_queued_requests", max_queued_requests, reason)
        if step_timeout is not None and (
            type(step_timeout) not in (int, float) or not step_timeout > 0
        ):
            raise ConfigError("step_timeout", step_timeout, "must be a number above 0, or None")
        resolved = engine_args.resolved()
        config = EngineConfig.from_args(resolved)
        where = places(
            config.num_replicas, device=config.load.device, devices_each=devices_each(resolved)
        )
        processes: list[EngineProcess] = []
        weakref.finalize(self, _kill, processes)
        try:
            for place in where:
                processes.append(launch(engine_args.changed(), place))
            # Meanwhile the processes load the model.
            opened = open_model(config)
            model, self.tokenizer, self.images = opened.config, opened.tokenizer, opened.images
            if check_tokenizer is not None:
                check_tokenizer(self.tokenizer)
            grammars = None
            if not isinstance(model, PoolingModel):
                grammars = open_grammars(self.tokenizer, model.vocab_size, model.eos_token_ids)
            if grammars is not None:
                grammars.warm_up()
            all_ready = wait_until_ready(processes)
        except BaseException:
            _kill(processes)
            raise
        ready = all_ready[0]
        max_model_len = min(one.max_model_len for one in all_ready)
        self.process = processes[0]
        self._replicas = [
            Replica(
                process,
                name_of(index, len(processes)),
                handle=self._handle,
                fail=self._fail_everything,
            )
            for index, process in enumerate(processes)
        ]
        num_blocks = sum(one.num_blocks for one in all_ready)
        self._several = len(processes) > 1
        tokens = num_blocks * config.cache.block_size // len(processes)
        capacity = max(_MOST_INDEXED * tokens * _TOKEN_BYTES // PIECE_BYTES, 1)
        self._chooser = ReplicaChooser(len(processes), capacity=capacity)
        self.info = EngineInfo(
            model=config.load.model,
            served_names=tuple(served_names)
            or tuple(engine_args.served_model_name)
            or (config.load.model,),
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            device=ready.device,
            dtype=ready.dtype,
            backend=ready.backend,
            offload=ready.offload,
            default_sampling=opened.default_sampling,
            max_logprobs=model.vocab_size if config.max_logprobs == -1 else config.max_logprobs,
            pooling=PoolingInfo.of(model) if isinstance(model, PoolingModel) else None,
            started_seconds={
                **{name: max(one.seconds[name] for one in all_ready) for name in ready.seconds},
                "total": time.monotonic() - begun,
            },
            num_replicas=len(processes),
        )
        self._model = ModelInfo(
            model=config.load.model,
            tokenizer=config.load.tokenizer,
            served_model_name=self.info.served_names[0],
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            dtype=ready.dtype,
            seed=config.seed,
        )
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            eos_ids=model.eos_token_ids,
            max_logprobs=config.max_logprobs,
            seed=config.seed,
            images=self.images,
            grammars=grammars,
            constraints=config.constraints,
            prompt_adapters=None
            if isinstance(model, PoolingModel)
            else open_prompt_adapters(config, model),
        )
        self.pooling_inputs = None
        if isinstance(model, PoolingModel):
            self.pooling_inputs = PoolingInputs(self.tokenizer, model)
        self._max_running = config.max_num_seqs * len(processes)
        self._max_queued = max_queued_requests
        self.step_timeout = step_timeout or STEP_TIMEOUTS[ready.device.partition(":")[0]]
        self.threads = TokenizerThreads()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, OutputStream] = {}  # by key, see messages.AddRequest
        self._keys: dict[str, str] = {}  # by request id
        self._num_requests = 0
        self._adapters: dict[LoRARequest, AdapterRef] = {}  # that the engine knows
        self._lora_enabled = config.lora.enabled
        self._download_dir = config.load.download_dir
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self.finish_rate = FinishRate()
        self._failure: str | None = None  # why nothing can be served
        self._draining = False
        self._stop_by = 0.0  # when a process that was asked to end is killed

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs | Mapping[str, Any],
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
        *,
        served_names: Sequence[str] = (),
        max_queued_requests: int = 1024,
        step_timeout: float | None = None,
    ) -> AsyncLLMEngine:
        """The same as the constructor, by the name that vLLM's users know.

        The engine always starts its loop; `usage_context` has no meaning here, since nothing is
        reported; `stat_loggers` are not available yet.
        """
        if start_engine_loop is not True:
            raise ConfigError("start_engine_loop", start_engine_loop, "the engine always starts")
        refuse_later("stat_loggers", stat_loggers, "a logger of statistics of the user's own")
        return cls(
            engine_args,
            served_names=served_names,
            max_queued_requests=max_queued_requests,
            step_timeout=step_timeout,
        )

    # -- requests ---------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt | PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient`. A prompt has any of the forms that `LLM.generate` takes.

        If the reader is slower than the engine, outputs beyond 256 are merged. All outputs but the
        last have the `metrics` of the first. `lora_request` and `prompt_adapter_request` name the
        adapters of the request. `data_parallel_rank` is the number of the replica that serves it,
        from 0; None: the one that knows most of the prompt. `trace_headers` and another priority
        than 0 are not available yet; `tokenization_kwargs` must be empty.
        """
        refuse_options(tokenization_kwargs)
        outputs = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            trace_headers=trace_headers,
            prompt_adapter_request=prompt_adapter_request,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt | PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
        *,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Starts a request at once and returns the outputs that `generate` yields. Read them to
        their end, or abort the request: it keeps its id until then.

        Args:
            arrival_time: not used: a request arrives with this call.
            lora_request: its adapter, which the engine reads if it is new; needs `enable_lora`.
            prompt_adapter_request: its prompt adapter, which a thread of this process reads if it
                is not in memory; needs `enable_prompt_adapter`.
            data_parallel_rank: see `generate`.

        Raises:
            RequestError, OverloadedError, DuplicateRequestError, EngineDeadError: see
                `EngineClient.generate`.
        """
        refuse_later("trace_headers", trace_headers, "tracing of requests without a server")
        refuse_later("priority", priority or None, "priority scheduling")
        usable = self._usable(data_parallel_rank)
        self._attach_loop()
        if self.info.pooling is not None:
            name = self.info.pooling.class_name
            raise PoolingError("task", "generate", f"{name} pools and generates no text")
        stream = self._open_stream(request_id)
        try:
            adapter = None
            if lora_request is not None:
                adapter = await self._open_adapter(check_lora_request(lora_request))
            if prompt_adapter_request is not None:
                await self.add_prompt_adapter(prompt_adapter_request)
            request = await self._checked_request(
                parse_prompt(prompt), params, adapter, prompt_adapter_request
            )
            self._submit(stream, request, usable)
            if request.grammar is not None:
                # The engine compiles it, too, and computes the prompt meanwhile.
                check = partial(self._inputs.check_grammar, request)
                size = 0 if self._inputs.checks_quickly(request) else _CONSTRAINT_CHARACTERS
                await self.threads.run(check, size=size)
        except BaseException:
            self._close_stream(stream)
            raise
        return self._outputs(stream, request)

    async def _outputs(
        self, stream: OutputStream, request: Request
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            assembler = Assembler(request, stream.request_id, stream.arrival)
            finished = False
            while not finished:
                output = assembler.add(await stream.get())
                finished = output.finished
                if finished:
                    self.finish_rate.note()
                    self._close_stream(stream)
                if output.error is not None:
                    constraint = request.params.structured_outputs
                    if constraint is not None:  # as `LLM`: the request's own mistake
                        raise RequestError(*constraint.given, output.error)
                    if request.adapter is not None:  # whose files have gone or changed
                        raise AdapterError("lora_request", request.adapter.name, output.error)
                    raise HeteroLLMError(output.error)
                yield output
        finally:
            self._close_stream(stream)

    async def encode(
        self,
        prompt: Prompt | PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: None = None,
        trace_headers: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yields the one result of a prompt, as `LLM.encode` returns it.

        Raises:
            RequestError: the prompt or a parameter is wrong, or the model does not pool.
            OverloadedError, DuplicateRequestError, EngineDeadError: as `generate`.
        """
        refuse_later("lora_request", lora_request, "LoRA")
        refuse_later("trace_headers", trace_headers, "tracing of requests without a server")
        refuse_later("priority", priority or None, "priority scheduling")
        made = self.pooling_inputs
        if made is None:
            raise PoolingError("task", "encode", "this model generates text and does not pool")
        if not isinstance(pooling_params, PoolingParams):
            raise PoolingError("pooling_params", pooling_params, "must be a PoolingParams")
        import torch

        params = pooling_params.clone()
        finish = made.finish_of(params, params.task or made.model.tasks[0])
        parsed = parse_prompt(prompt)
        (one,) = await self.threads.run(
            lambda: made.prompts([parsed], [params], name_index=False), size=len(parsed.text or "")
        )
        result = await self.pool(request_id, [one], finish)
        output = PoolingOutput(torch.from_numpy(result.values[0].copy()))
        yield PoolingRequestOutput(request_id, output, one.token_ids.tolist())

    async def pool(
        self,
        request_id: str,
        inputs: Sequence[PoolingInput],
        finish: Finish,
        *,
        data_parallel_rank: int | None = None,
    ) -> PoolingResult:
        """See `EngineClient`."""
        usable = self._usable(data_parallel_rank)
        self._attach_loop()
        stream = self._open_stream(request_id)
        try:
            request = PoolingRequest(stream.key, inputs, finish)
            num_pieces = request.num_tokens * _TOKEN_BYTES / PIECE_BYTES
            stream.assignment = self._chooser.choose((), usable=usable, num_pieces=num_pieces)
            self._send(stream, messages.AddPooling(request))
            stream.sent = True
            result: PoolingResult = await stream.get()
            self.finish_rate.note()
        finally:
            self._close_stream(stream)
        if result.error is not None:
            raise HeteroLLMError(result.error)
        return result

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output has not arrived. `stats().queue` also counts those whose
        outputs have arrived and wait to be read."""
        return sum(not stream.ended for stream in self._streams.values())

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """See `EngineClient`; several ids may be given. `internal`: see `LLMEngine`."""
        self._attach_loop()
        for one in [request_id] if isinstance(request_id, str) else request_id:
            stream = self._streams.get(self._keys.get(one, ""))
            if stream is None:
                continue
            stream.abort_wanted = True
            if stream.sent:
                self._send(stream, messages.Abort(stream.key))
            if self.pooling_inputs is not None:  # the engine sends no last output for it
                stream.fail(lambda: HeteroLLMError("the request was aborted"))

    def _open_stream(self, request_id: str) -> OutputStream:
        if not isinstance(request_id, str) or not request_id:
            raise RequestError("request_id", request_id, "must be a string that is not empty")
        self.check_health()
        if self._draining:
            raise EngineDeadError("the engine is being shut down")
        if request_id in self._keys:
            raise DuplicateRequestError(request_id)
        self._check_load()
        if not self._streams:
            self.finish_rate.clear()  # an idle time would lower the rate of finishing
        key = str(self._num_requests)
        self._num_requests += 1
        self._keys[request_id] = key
        stream = self._streams[key] = OutputStream(key, request_id, time.monotonic())
        return stream

    def _close_stream(self, stream: OutputStream) -> None:
        """Removes a stream and aborts its request if unfinished. May be called again."""
        if self._streams.pop(stream.key, None) is None:
            return
        del self._keys[stream.request_id]
        if stream.assignment is not None:
            self._chooser.finished(stream.assignment, answered=stream.answered)
        if stream.sent and not stream.ended and self._failure is None:
            self._send(stream, messages.Abort(stream.key))

    def _check_load(self) -> None:
        """Raises OverloadedError if too many requests wait.

        How many wait follows from the number of streams, or, if KV blocks are short, from the last
        heartbeat. `retry_after` is the time in which they will be finished at the recent rate.
        """
        live = len(self._streams)
        waiting_now = sum(one.metrics.get("num_requests_waiting", 0) for one in self._replicas)
        said = min(int(waiting_now), live)
        waiting = max(live - self._max_running, said)
        if (waiting + 1 if said else live + 1 - self._max_running) <= self._max_queued:
            return
        reason = f"{waiting} requests are waiting (max_queued_requests={self._max_queued})"
        raise OverloadedError(self.finish_rate.seconds_for(waiting + 1), reason)

    async def _checked_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        adapter: AdapterRef | None,
        prompt_adapter: PromptAdapterRequest | None,
    ) -> Request:
        """The request, ready for the engine and checked, but for whether its grammar compiles.

        Raises:
            RequestError: the prompt or a parameter is wrong.
        """

        if isinstance(params, SamplingParams):
            params = params.clone()  # its owner may assign to it while a thread works

        def make() -> Request:
            return self._inputs.make_request(
                "", prompt, params, adapter, prompt_adapter, check_grammar=False
            )

        if prompt.images:
            return await self.threads.run_on_images(make)
        ids = prompt.token_ids
        size = len(prompt.text or "") if ids is None else len(ids) // _IDS_PER_CHARACTER
        if isinstance(params, SamplingParams) and not self._inputs.writes_quickly(params):
            size += _CONSTRAINT_CHARACTERS
        return await self.threads.run(make, size=size)

    def _usable(self, rank: int | None) -> Collection[int] | None:
        """The replicas that may serve a request, from a caller's choice; None: all.

        Raises:
            RequestError: no replica has this number.
        """
        if rank is None:
            return None
        most = len(self._replicas) - 1
        if isinstance(rank, bool) or not isinstance(rank, Integral) or not 0 <= rank <= most:
            reason = f"must be an integer from 0 to {most} (data_parallel_size={most + 1})"
            raise RequestError("data_parallel_rank", rank, reason)
        return (int(rank),)

    def _submit(
        self, stream: OutputStream, request: Request, usable: Collection[int] | None
    ) -> None:
        message = messages.request_to_wire(stream.key, request)
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        pieces = []
        if self._several:
            pieces = piece_hashes(request.packed_prompt, request.root_hash)
        stream.assignment = self._chooser.choose(pieces, usable=usable)
        self._send(stream, message)
        stream.sent = True
        if stream.abort_wanted:
            self._send(stream, messages.Abort(stream.key))

    # -- adapters ---------------------------------------------------------------------------

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter before a request needs it; True, as vLLM's. No request makes progress
        while the engine reads it.

        Raises:
            AdapterError: it cannot be served.
        """
        await self._open_adapter(check_lora_request(lora_request))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forgets the adapter with this number; False if there is none. Its requests go on."""
        known = [one for one in self._adapters if one.lora_int_id == lora_id]
        for request in known:
            del self._adapters[request]
            await self._call_engines("forget_adapter", request.lora_name)
        return bool(known)

    async def list_loras(self) -> set[int]:
        """The numbers of the known adapters."""
        return {request.lora_int_id for request in self._adapters}

    async def add_prompt_adapter(self, request: PromptAdapterRequest) -> None:
        """Reads a prompt adapter before a request needs it.

        Raises:
            AdapterError: it cannot be served.
        """
        known = self._inputs.prompt_adapters
        if not known.is_loaded(check_prompt_adapter_request(request)):
            await asyncio.to_thread(known.open, request)

    async def num_virtual_tokens(self, path: str) -> int:
        """Of the prompt adapter in a folder, or of a hub id.

        Raises:
            AdapterError: there is none.
        """
        from hetero_llm.lora.prompt_tuning import num_virtual_tokens

        return await asyncio.to_thread(
            partial(num_virtual_tokens, path, download_dir=self._download_dir)
        )

    async def _open_adapter(self, request: LoRARequest) -> AdapterRef:
        """The adapter of a request; the engine is asked once for each.

        Raises:
            AdapterError: it cannot be served.
        """
        named = dataclasses.replace(request, load_inplace=False)
        known = self._adapters.get(named)
        if known is not None and not request.load_inplace:
            return known
        path = await self._local_path(request)
        found_by = await self._call_engines(
            "open_adapter", request.lora_name, request.lora_int_id, path,
            request.base_model_name, request.load_inplace,
        )  # fmt: skip
        content_hash, rank = found_by[0]
        if any(each != found_by[0] for each in found_by):
            reason = "its files changed while the engines read them; load it again"
            raise AdapterError("lora_path", request.lora_path, reason)
        for other in [one for one in self._adapters if one.lora_name == request.lora_name]:
            del self._adapters[other]
        found = self._adapters[named] = AdapterRef(named, content_hash, rank)
        return found

    async def _local_path(self, request: LoRARequest) -> str:
        """The adapter's path for the engine, which makes no step while it opens one: what a hub id
        names is fetched here.

        Raises:
            AdapterError: the hub did not deliver it.
        """
        path = request.lora_path
        if not self._lora_enabled or not is_hub_id(path) or Path(path).exists():
            return path
        from hetero_llm.lora.files import adapter_folder

        fetch = partial(adapter_folder, path, field="lora_path", download_dir=self._download_dir)
        return str(await asyncio.to_thread(fetch))

    # -- the engine as a whole --------------------------------------------------------------

    def stats(self) -> EngineStats:
        """See `EngineClient`."""
        self._receive_if_allowed()
        metrics = merge_figures([one.metrics for one in self._replicas])
        return EngineStats(
            metrics=metrics,
            num_steps=int(metrics.get("num_steps", 0)),
            last_step_age=max(one.age for one in self._replicas),
            queue=len(self._streams),
            histograms=merge_histograms([one.histograms for one in self._replicas]),
            replicas=tuple(one.metrics for one in self._replicas) if self._several else (),
        )

    def check_health(self) -> Awaitable[None]:
        """See `EngineClient`. The check is done by the call; awaiting its result is allowed, as in
        vLLM. A hung engine is asked for its threads' stacks, on stderr."""
        self._receive_if_allowed()
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        for replica in self._replicas:
            replica.check_life(self.step_timeout)
        return _Checked()

    @property
    def errored(self) -> bool:
        """Whether nothing can be served any more."""
        self._receive_if_allowed()
        return self._failure is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """What requests raise once `errored`."""
        return EngineDeadError(self._failure or "the engine is not dead")

    @property
    def is_running(self) -> bool:
        """Whether new requests are accepted."""
        return not self.errored and not self._draining

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    async def get_tokenizer(self, lora_request: None = None) -> Any:
        """The transformers tokenizer, or None."""
        refuse_later("lora_request", lora_request, "LoRA")
        return None if self.tokenizer is None else self.tokenizer.hf

    @property
    def model_config(self) -> ModelInfo:
        return self._model

    async def get_model_config(self) -> ModelInfo:
        return self._model

    async def metrics(self) -> dict[str, float]:
        """The present `LLM.metrics`; `stats` has those of the last heartbeat."""
        return merge_figures(await self._call_engines("metrics"))

    async def get_metrics(self) -> list[Metric]:
        """The present `LLM.get_metrics`; its histograms are those of the last heartbeat."""
        labels = {"model_name": self.info.served_names[0], "engine": "0"}
        histograms = merge_histograms([one.histograms for one in self._replicas])
        return metric_objects(await self.metrics(), histograms, labels)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """See `LLM.reset_prefix_cache`."""
        await self._call_engines("reset_prefix_cache")
        for index in range(len(self._replicas)):
            self._chooser.forget(index)
        return True

    async def reset_mm_cache(self) -> None:
        """See `LLM.reset_mm_cache`."""

    async def reset_encoder_cache(self) -> None:
        """See `LLM.reset_encoder_cache`."""

    async def save_lookahead_cache(self, path: str | os.PathLike[str]) -> None:
        """See `LLM.save_lookahead_cache`. No request makes progress meanwhile. Each of several
        replicas has learned something else: the first one saves to `path`, the others to
        `path.1`, `path.2` and so on."""
        await self._call_each("save_lookahead_cache", [[one] for one in self._paths(path)])

    async def load_lookahead_cache(self, path: str | os.PathLike[str]) -> None:
        """See `LLM.load_lookahead_cache`. No request makes progress meanwhile. A replica without a
        file of its own loads that of the first one."""
        first, *others = self._paths(path)
        paths = [first, *(one if os.path.exists(one) else first for one in others)]
        await self._call_each("load_lookahead_cache", [[one] for one in paths])

    def _paths(self, path: str | os.PathLike[str]) -> list[str]:
        whole = os.path.abspath(path)
        return [f"{whole}.{index}" if index else whole for index in range(len(self._replicas))]

    def shutdown(self, drain_seconds: float | None = None) -> Awaitable[None]:
        """See `EngineClient`. Without `drain_seconds` the call itself ends the engine at once, and
        its result need not be awaited, as in vLLM."""
        if drain_seconds is not None:
            return self._drain(drain_seconds)
        self._draining = True
        self._fail_everything("the engine was shut down", kill=False)
        _kill([one.process for one in self._replicas])
        self.threads.close()
        return _Checked()

    async def _drain(self, drain_seconds: float) -> None:
        """Ends the engine once its requests have finished, or after this time. A second call with
        an earlier limit ends the wait of the first one. A hung engine gets no time to drain."""
        self._draining = True
        deadline = time.monotonic() + drain_seconds
        if self._failure is None:
            self._attach_loop()
        while self._streams and time.monotonic() < deadline:
            try:
                self.check_health()
            except EngineDeadError:
                break
            await asyncio.sleep(_POLL_SECONDS)
        hung = False
        for replica in self._replicas:
            if replica.hung:  # a process stopped by a signal writes its stacks once it continues
                hung = True
                replica.process.popen.send_signal(signal.SIGCONT)
        if self._failure is None:
            for replica in self._replicas:
                replica.send(messages.Shutdown())
            end = "hung and was ended" if hung else "was shut down"
            self._fail_everything(f"the engine {end}", kill=False)
            self._stop_by = time.monotonic() + _SECONDS_TO_STOP
        processes = [replica.process for replica in self._replicas]
        while time.monotonic() < self._stop_by:
            running = [one for one in processes if one.popen.poll() is None]
            if not running:
                break
            for process in running:
                process.socket.flush()
            await asyncio.sleep(_POLL_SECONDS)
        _kill(processes)
        self.threads.close()

    async def _call_engines(self, name: str, *arguments: Any) -> list[Any]:
        """Asks every replica for one of `engine_process.CALLS`; returns their results."""
        return await self._call_each(name, [arguments] * len(self._replicas))

    async def _call_each(self, name: str, arguments_of: Sequence[Sequence[Any]]) -> list[Any]:
        """As `_call_engines`, with arguments for each replica."""
        self._attach_loop()
        self.check_health()
        loop = asyncio.get_running_loop()
        numbers = range(self._num_calls, self._num_calls + len(self._replicas))
        self._num_calls = numbers.stop
        futures = [loop.create_future() for _ in numbers]
        self._calls.update(zip(numbers, futures, strict=True))
        try:
            sent = zip(self._replicas, numbers, arguments_of, strict=True)
            for replica, number, arguments in sent:
                replica.send(messages.Call(number, name, list(arguments)))
            results = await asyncio.gather(*futures, return_exceptions=True)
        finally:
            for number in numbers:
                del self._calls[number]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return list(results)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(why_missing("AsyncLLMEngine", name))

    # -- messages ---------------------------------------------------------------------------

    def _attach_loop(self) -> None:
        """Makes the running loop the one that reads from the engine."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("this engine is used in another event loop")
        self._loop = loop
        for stream in list(self._streams.values()):  # of a loop that was closed
            self._close_stream(stream)
        if self._failure is None:
            for replica in self._replicas:
                replica.attach(loop)

    def _send(self, stream: OutputStream, message: messages.Message) -> None:
        """Sends a message about a request to the replica that serves it."""
        assert stream.assignment is not None
        self._replicas[stream.assignment.replica].send(message)

    def _receive_if_allowed(self) -> None:
        """Reads messages now, so that an engine does not count as hung because the loop was busy.
        In any other thread than the loop's it does nothing."""
        if self._loop is not None and self._loop.is_running():
            try:
                if asyncio.get_running_loop() is not self._loop:
                    return
            except RuntimeError:
                return
        self._receive()

    def _receive(self) -> None:
        for replica in self._replicas:
            if self._failure is not None:
                replica.process.popen.poll()  # leaves no zombie
            else:
                replica.receive()

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, messages.StepOutputs):
            for output in message.outputs:
                self._put(output.key, output, last=output.finished)
        elif isinstance(message, messages.PooledOutputs):
            for result in message.outputs:
                self._put(result.key, result, last=True)
        elif isinstance(message, messages.RequestFailed):
            failed = self._streams.get(message.key)
            if failed is not None:
                error = messages.error_from_wire(message.error)
                failed.fail(lambda: error)
        elif isinstance(message, messages.CallResult):
            self._finish_call(message)

    def _put(self, key: str, output: messages.Output | PoolingResult, *, last: bool) -> None:
        stream = self._streams.get(key)
        if stream is None:
            return
        if not stream.answered and stream.assignment is not None:
            self._chooser.answered(stream.assignment)
        stream.answered = True
        stream.put(output, last=last)

    def _finish_call(self, result: messages.CallResult) -> None:
        future = self._calls.get(result.number)
        if future is None or future.done():
            return
        if result.error is None:
            future.set_result(result.result)
        else:
            future.set_exception(messages.error_from_wire(result.error))

    def _fail_everything(self, text: str, *, kill: bool = True) -> None:
        """Fails every stream and call, and all later ones, with `EngineDeadError(text)`."""
        if self._failure is not None:
            return
        self._failure = text
        for replica in self._replicas:
            replica.detach()
        for stream in self._streams.values():
            stream.fail(lambda: EngineDeadError(text))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(text))
        if kill:
            logger.error("%s", text)
            for replica in self._replicas:
                replica.process.popen.kill()  # without waiting: freeing memory may take a while


def devices_each(resolved: Mapping[str, Any]) -> int:
    """GPUs of one engine.

    Args:
        resolved: the value of every engine argument.
    """
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "sequence_parallel_size")
    return math.prod(int(resolved.get(name) or 1) for name in sizes)


def _kill(processes: Iterable[EngineProcess]) -> None:
    """Ends engine processes now. May be called again."""
    for process in processes:
        process.kill()
