"""`AsyncLLMEngine`: many requests at once from an event loop, the engine in its own process.

Everything here runs in the event loop's thread, but for the tokenizing of long prompts. The loop
never waits for the engine, nor the engine for the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from hetero_llm.config.args import ENGINE_ARGS, Status, resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    EngineHungError,
    HeteroLLMError,
    OverloadedError,
    RequestError,
)
from hetero_llm.core.histogram import Histogram
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine import messages
from hetero_llm.engine.engine_client import EngineInfo, EngineStats
from hetero_llm.engine.engine_launcher import EngineProcess, launch
from hetero_llm.engine.factory import open_model
from hetero_llm.engine.images import ImageInputs
from hetero_llm.engine.input_processor import InputProcessor, Prompt, parse_prompt
from hetero_llm.engine.output_stream import Assembler, OutputStream
from hetero_llm.engine.tokenizer import Tokenizer, TokenizerThreads

logger = logging.getLogger(__name__)

STEP_TIMEOUTS = {"cuda": 30.0, "cpu": 120.0}
"""Seconds without a sign of life after which an engine counts as hung, by device."""
_IDS_PER_CHARACTER = 8
"""Token ids that are checked in the time in which one character is encoded."""
_FINISHES_KEPT = 32
_RETRY_SECONDS = 1.0, 60.0
"""Least and most that a client is told to wait."""
_SECONDS_TO_STOP = 1.5
_LOOK = 0.01


class AsyncEngineArgs:
    """The engine arguments of `LLM`, by name: `AsyncEngineArgs(model="demo", max_num_seqs=64)`.

    Raises:
        ConfigError: an argument is unknown or wrong.
    """

    def __init__(self, **engine_args: Any) -> None:
        self.values: Mapping[str, Any] = resolve_engine_args(engine_args)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in _changed(self.values).items())
        return f"AsyncEngineArgs({given})"


class AsyncLLMEngine:
    """An `EngineClient` whose engine is a process of its own, started and ended by this object.

    To be used from one event loop at a time. The constructor waits until the model is loaded;
    inside a running loop call it through `asyncio.to_thread`.

    Args:
        engine_args: see docs/flags.md.
        served_names: names of the model for clients; none means its own.
        max_queued_requests: requests that may wait for a place among the `max_num_seqs` that run.
        step_timeout: seconds without a sign of life after which the engine counts as hung; None
            means 30 on a GPU, 120 on a CPU. It has to be longer than the longest step.

    Raises:
        ConfigError: an argument is wrong.
        ModelLoadError: the model cannot be loaded.
        EngineDeadError: the engine's process ended during the start.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None
    images: ImageInputs | None

    def __init__(
        self,
        engine_args: AsyncEngineArgs | Mapping[str, Any],
        *,
        served_names: Sequence[str] = (),
        max_queued_requests: int = 1024,
        step_timeout: float | None = None,
    ) -> None:
        begun = time.monotonic()
        if not isinstance(engine_args, AsyncEngineArgs):
            engine_args = AsyncEngineArgs(**engine_args)
        if type(max_queued_requests) is not int or max_queued_requests < 0:
            reason = "must be an integer of at least 0"
            raise ConfigError("max_queued_requests", max_queued_requests, reason)
        if step_timeout is not None and (
            type(step_timeout) not in (int, float) or not step_timeout > 0
        ):
            raise ConfigError("step_timeout", step_timeout, "must be a number above 0, or None")
        config = EngineConfig.from_args(engine_args.values)
        self._process = launch(_changed(engine_args.values))
        self._link = self._process.link
        weakref.finalize(self, EngineProcess.kill, self._process)
        try:
            # While the process does the same.
            model, _, self.tokenizer, self.images = open_model(config)
            ready = self._process.wait_until_ready()
        except BaseException:
            self._process.kill()
            raise
        self.info = EngineInfo(
            model=config.load.model,
            served_names=tuple(served_names) or (config.load.model,),
            max_model_len=ready.max_model_len,
            vocab_size=model.vocab_size,
            num_blocks=ready.num_blocks,
            block_size=config.cache.block_size,
            device=ready.device,
            dtype=ready.dtype,
            backend=ready.backend,
            offload=ready.offload,
            started_seconds={**ready.seconds, "total": time.monotonic() - begun},
        )
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=ready.max_model_len,
            eos_ids=model.eos_token_ids,
            max_logprobs=config.max_logprobs,
            seed=config.seed,
            images=self.images,
        )
        self._max_running = config.max_num_seqs
        self._max_queued = max_queued_requests
        self._step_timeout = step_timeout or STEP_TIMEOUTS[ready.device.partition(":")[0]]
        self.threads = TokenizerThreads()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, OutputStream] = {}  # by key
        self._keys: dict[str, str] = {}  # by request id
        self._num_requests = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._metrics: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}
        self._last_life = time.monotonic()
        self._finishes: deque[float] = deque(maxlen=_FINISHES_KEPT)
        self._failure: str | None = None  # why nothing can be served
        self._draining = False
        self._stop_by = 0.0  # when a process that was told to end is killed
        self._dumped = False

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs | Mapping[str, Any],
        *,
        served_names: Sequence[str] = (),
        max_queued_requests: int = 1024,
        step_timeout: float | None = None,
    ) -> AsyncLLMEngine:
        """The same as the constructor, by the name that vLLM's users know."""
        return cls(
            engine_args,
            served_names=served_names,
            max_queued_requests=max_queued_requests,
            step_timeout=step_timeout,
        )

    # -- requests ---------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        prompt: Prompt | str | Mapping[str, Any],
        params: SamplingParams,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient`. A string, or a mapping as `LLM.generate` takes it, is a prompt, too.

        A reader that is slower than the engine gets its outputs merged: 256 are kept. `metrics`
        are those of the first output until the last one comes.
        """
        self._attach()
        stream = self._open(request_id)
        try:
            prompt = parse_prompt(prompt)
            request = await self._checked(prompt, params)
            self._submit(stream, request)
            assembler = Assembler(request, request_id, stream.arrival)
            finished = False
            while not finished:
                output = assembler.add(await stream.get())
                finished = output.finished
                if finished:
                    self._finishes.append(time.monotonic())
                    self._close(stream)
                if output.error is not None:
                    raise HeteroLLMError(output.error)
                yield output
        finally:
            self._close(stream)

    async def abort(self, request_id: str) -> None:
        """See `EngineClient`."""
        self._attach()
        stream = self._streams.get(self._keys.get(request_id, ""))
        if stream is None:
            return
        stream.abort_wanted = True
        if stream.sent:
            self._post(messages.Abort(stream.key))

    def _open(self, request_id: str) -> OutputStream:
        if not isinstance(request_id, str) or not request_id:
            raise RequestError("request_id", request_id, "must be a string that is not empty")
        self.check_health()
        if self._draining:
            raise EngineDeadError("the engine is being shut down")
        if request_id in self._keys:
            raise DuplicateRequestError(request_id)
        self._check_load()
        if not self._streams:
            self._finishes.clear()  # how long nobody asked says nothing about how fast it goes
        key = str(self._num_requests)
        self._num_requests += 1
        self._keys[request_id] = key
        stream = self._streams[key] = OutputStream(key, request_id, time.monotonic())
        return stream

    def _close(self, stream: OutputStream) -> None:
        """Forgets a stream; a request that is not finished is aborted. May be called again."""
        if self._streams.pop(stream.key, None) is None:
            return
        del self._keys[stream.request_id]
        if stream.sent and not stream.ended and self._failure is None:
            self._post(messages.Abort(stream.key))

    def _check_load(self) -> None:
        """Raises OverloadedError if one more request would have too many to wait with.

        How many wait follows from their number, or, if KV blocks are short, from the last
        heartbeat. The advice is the time until those will have been served, at the rate of late.
        """
        live = len(self._streams)
        said = min(int(self._metrics.get("num_requests_waiting", 0)), live)
        waiting = max(live - self._max_running, said)
        if (waiting + 1 if said else live + 1 - self._max_running) <= self._max_queued:
            return
        low, high = _RETRY_SECONDS
        seconds = low
        if self._finishes:
            passed = time.monotonic() - self._finishes[0]
            seconds = min(max((waiting + 1) * passed / len(self._finishes), low), high)
        reason = f"{waiting} requests are waiting (max_queued_requests={self._max_queued})"
        raise OverloadedError(seconds, reason)

    async def _checked(self, prompt: Prompt, params: SamplingParams) -> Request:
        """The request, checked and ready for the engine.

        Raises:
            RequestError: the prompt or a parameter is wrong.
        """

        def make() -> Request:
            return self._inputs.make_request("", prompt, params)

        if prompt.images:
            return await self.threads.run_on_images(make)
        ids = prompt.token_ids
        size = len(prompt.text or "") if ids is None else len(ids) // _IDS_PER_CHARACTER
        return await self.threads.run(make, size=size)

    def _submit(self, stream: OutputStream, request: Request) -> None:
        message = messages.request_to_wire(stream.key, request)
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        self._post(message)
        stream.sent = True
        if stream.abort_wanted:
            self._post(messages.Abort(stream.key))

    # -- the engine as a whole --------------------------------------------------------------

    def stats(self) -> EngineStats:
        """See `EngineClient`."""
        self._look()
        return EngineStats(
            metrics=self._metrics,
            num_steps=int(self._metrics.get("num_steps", 0)),
            last_step_age=time.monotonic() - self._last_life,
            queue=len(self._streams),
            histograms=self._histograms,
        )

    def check_health(self) -> None:
        """See `EngineClient`. When it finds the engine hung, the engine's threads are asked for
        their stacks, on stderr."""
        self._look()
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        age = time.monotonic() - self._last_life
        if age <= self._step_timeout:
            self._dumped = False
            return
        if not self._dumped:
            self._dumped = True
            logger.error("the engine has shown no life for %.1f s", age)
            self._process.popen.send_signal(signal.SIGUSR1)
        raise EngineHungError(
            f"the engine has shown no life for {age:.1f} s (step_timeout={self._step_timeout:g})"
        )

    async def get_metrics(self) -> dict[str, float]:
        """`LLM.get_metrics` of this moment; `stats` has those of the last heartbeat."""
        return await self._call("metrics")

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient`."""
        await self._call("reset_prefix_cache")

    async def save_lookahead_cache(self, path: str | os.PathLike[str]) -> None:
        """See `LLM.save_lookahead_cache`. No request makes progress meanwhile."""
        await self._call("save_lookahead_cache", os.path.abspath(path))

    async def load_lookahead_cache(self, path: str | os.PathLike[str]) -> None:
        """See `LLM.load_lookahead_cache`. No request makes progress meanwhile."""
        await self._call("load_lookahead_cache", os.path.abspath(path))

    async def shutdown(self, drain_seconds: float) -> None:
        """See `EngineClient`. A second call ends the wait of the first, if its limit is earlier.
        Nothing is waited for when the engine is hung."""
        self._draining = True
        deadline = time.monotonic() + drain_seconds
        if self._failure is None:
            self._attach()
        while self._streams and time.monotonic() < deadline:
            try:
                self.check_health()
            except EngineDeadError:
                break
            await asyncio.sleep(_LOOK)
        if self._dumped:  # a stopped process writes its stacks when it goes on
            self._process.popen.send_signal(signal.SIGCONT)
        if self._failure is None:
            self._post(messages.Shutdown())
            hung = "hung and was ended" if self._dumped else "was shut down"
            self._lose(f"the engine {hung}", kill=False)
            self._stop_by = time.monotonic() + _SECONDS_TO_STOP
        while self._process.popen.poll() is None and time.monotonic() < self._stop_by:
            self._link.flush()
            await asyncio.sleep(_LOOK)
        self._process.kill()
        self.threads.close()

    async def _call(self, name: str, *arguments: Any) -> Any:
        """Asks for one of `engine_process.CALLS`."""
        self._attach()
        self.check_health()
        number = self._num_calls
        self._num_calls += 1
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._post(messages.Call(number, name, list(arguments)))
            return await future
        finally:
            del self._calls[number]

    # -- the link ---------------------------------------------------------------------------

    def _attach(self) -> None:
        """Reads from the engine in the running loop."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("this engine is used in another event loop")
        self._loop = loop
        for stream in list(self._streams.values()):  # of a loop that was closed
            self._close(stream)
        if self._failure is None:
            loop.add_reader(self._link.fileno(), self._take_arrived)

    def _post(self, message: messages.Message) -> None:
        self._link.send(messages.encode(message))
        if self._link.num_unsent:
            assert self._loop is not None
            self._loop.add_writer(self._link.fileno(), self._flush)

    def _flush(self) -> None:
        self._link.flush()
        if not self._link.num_unsent and self._loop is not None:
            self._loop.remove_writer(self._link.fileno())

    def _look(self) -> None:
        """Takes what has arrived, so that a loop that was busy does not make the engine look hung;
        in another thread that is left to the loop."""
        if self._loop is not None and self._loop.is_running():
            try:
                if asyncio.get_running_loop() is not self._loop:
                    return
            except RuntimeError:
                return
        self._take_arrived()

    def _take_arrived(self) -> None:
        if self._failure is not None:
            self._process.popen.poll()  # leaves no zombie
            return
        for data in self._link.receive():
            self._last_life = time.monotonic()
            self._take(messages.decode_from_engine(data))
        if self._link.closed:
            self._lose(f"the engine is dead: {self._process.how_it_ended()}")

    def _take(self, message: messages.Message) -> None:
        if isinstance(message, messages.StepOutputs):
            for output in message.outputs:
                stream = self._streams.get(output.key)
                if stream is not None:
                    stream.put(output)
        elif isinstance(message, messages.Heartbeat):
            self._metrics = message.metrics
            self._histograms = message.histograms
        elif isinstance(message, messages.RequestFailed):
            failed = self._streams.get(message.key)
            if failed is not None:
                error = messages.error_from_wire(message.error)
                failed.fail(lambda: error)
        elif isinstance(message, messages.CallResult):
            self._answer(message)
        elif isinstance(message, messages.Dead):
            self._lose(f"the engine is dead: a step failed: {message.text}")

    def _answer(self, result: messages.CallResult) -> None:
        future = self._calls.get(result.number)
        if future is None or future.done():
            return
        if result.error is None:
            future.set_result(result.result)
        else:
            future.set_exception(messages.error_from_wire(result.error))

    def _lose(self, text: str, *, kill: bool = True) -> None:
        """Nothing can be served any more: every stream and call ends with this text."""
        if self._failure is not None:
            return
        self._failure = text
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._link.fileno())
            self._loop.remove_writer(self._link.fileno())
        for stream in self._streams.values():
            stream.fail(lambda: EngineDeadError(text))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(text))
        if kill:
            logger.error("%s", text)
            self._process.popen.kill()  # its memory may take a while to go: nobody waits here


def _changed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that do something and are not at their default."""
    return {
        spec.name: values[spec.name]
        for spec in ENGINE_ARGS
        if spec.status is Status.EFFECTIVE and values[spec.name] != spec.default
    }
