"""`LLM`: offline generation, with the interface of the TACO-LLM manual and of vLLM."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError, EngineDeadError, RequestError
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.factory import BuiltEngine, build_engine, free_unreachable
from hetero_llm.engine.image_uri import chat_images
from hetero_llm.engine.input_processor import Prompt, pair_params, parse_prompts
from hetero_llm.utils.gc_control import prompt_wakeups, serve_promptly

if TYPE_CHECKING:
    from hetero_llm.spec_decode.lookahead.store import Store

logger = logging.getLogger(__name__)


class LLM:
    """A model and everything needed to generate text with it, in this process.

    Args:
        model: a folder in Hugging Face layout, a hub id, or "demo" for the embedded model.
        engine_args: see docs/flags.md; unknown names are errors.

    Raises:
        ConfigError: an argument is wrong.
        ModelLoadError: the model cannot be loaded.

    A context manager: leaving it frees the model and the KV cache.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        config = EngineConfig.from_args(resolve_engine_args({"model": model, **engine_args}))
        serve_promptly()
        with prompt_wakeups():
            built = build_engine(config, show_progress=sys.stderr.isatty())
        self._built: BuiltEngine | None = built
        self._num_requests = 0
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # of open streams

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees model and KV cache; further calls raise `EngineDeadError`."""
        device = "" if self._built is None else self._built.device
        if self._built is not None:
            self._built.engine.shut_down()
        self._built = None
        free_unreachable(device)

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        prompt_adapter_request: None = None,
        guided_options_request: None = None,
    ) -> list[RequestOutput]:
        """Generates a continuation of each prompt; prompts run together as far as memory allows.

        Args:
            prompts: a string, a dict with "prompt" or "prompt_token_ids" (and "cache_salt", and
                "multi_modal_data": {"image": one or a list}), or a list of those.
            sampling_params: one for all prompts or one each; default `SamplingParams()`.
            prompt_token_ids: token ids instead of, or along with, text.
            use_tqdm: show progress and tokens per second.
            lora_request, prompt_adapter_request, guided_options_request: not available yet.

        Returns:
            One finished output per prompt, in order. After Ctrl-C an unfinished one has the text
            so far and finish_reason "abort".

        Raises:
            RequestError: a prompt or parameter is wrong; names the prompt's index. No prompt has
                been started.
        """
        _refuse("lora_request", lora_request, "LoRA")
        _refuse("prompt_adapter_request", prompt_adapter_request, "prompt adapters")
        _refuse("guided_options_request", guided_options_request, "guided decoding")
        parsed = parse_prompts(prompts, prompt_token_ids)
        is_list = not isinstance(prompts, (str, Mapping)) and not (
            prompts is None and (not prompt_token_ids or isinstance(prompt_token_ids[0], int))
        )
        requests = self._make_requests(parsed, pair_params(sampling_params, len(parsed)), is_list)
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of conversations, through the chat template.

        Args:
            messages: dicts with "role" and "content"; a model that takes images has contents as
                lists of parts, too: {"type": "text", "text": ...}, {"type": "image", "image": ...},
                and {"type": "image_url", "image_url": {"url": "data:image/..."}}.
            chat_template: a Jinja template instead of the tokenizer's own.
            add_generation_prompt: open the assistant's turn.

        Raises:
            RequestError: no tokenizer, no template, or a conversation it refuses.
        """
        _refuse("lora_request", lora_request, "LoRA")
        tokenizer, takes_images = self._engine_parts().tokenizer, self._engine_parts().images
        if tokenizer is None:
            raise RequestError("messages", messages, "chat needs a tokenizer")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages", messages, "must be a conversation or a list of those")
        several = not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        prompts = []
        for index, conversation in enumerate(conversations):
            images: tuple[Any, ...] = ()
            try:
                if takes_images is not None:
                    conversation, images = chat_images(conversation)
                token_ids = tokenizer.apply_chat_template(
                    conversation,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                )
            except RequestError as error:
                raise (error.at_prompt(index) if several else error) from None
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
            prompts.append(Prompt(text, token_ids, images=images))
        params = pair_params(sampling_params, len(prompts))
        return self._run(self._make_requests(prompts, params, several), use_tqdm)

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yields the growing output of one prompt, per `sampling_params.output_kind`.

        Closing the iterator early aborts the request.
        """
        params = sampling_params or SamplingParams()
        (request,) = self._make_requests(parse_prompts(prompt), [params], False, final_only=False)
        engine = self._engine_parts().engine
        inbox = self._inboxes[request.request_id] = deque()
        engine.add_request(request)
        finished = False
        try:
            while not finished:
                if not inbox:  # else a step of another call has already filled it
                    inbox.extend(self._step({request.request_id}))
                    continue
                output = inbox.popleft()
                if output.error is not None:
                    raise RequestError("logits_processors", None, output.error)
                finished = output.finished
                yield output
        finally:
            del self._inboxes[request.request_id]
            engine.abort(request.request_id)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer, or None."""
        tokenizer = self._engine_parts().tokenizer
        return None if tokenizer is None else tokenizer.hf

    def get_metrics(self) -> dict[str, float]:
        """Counters since start and gauges of the present state, by name; names follow vLLM's
        metrics."""
        parts = self._engine_parts()
        return parts.engine.metrics() | ({} if parts.store is None else parts.store.metrics())

    def reset_prefix_cache(self) -> None:
        """Drops all cached prefixes."""
        self._engine_parts().engine.reset_prefix_cache()

    def save_lookahead_cache(self, path: str | os.PathLike[str]) -> None:
        """Saves the lookahead cache, which holds the tokens of all requests, in one file.

        Raises:
            ConfigError: there is no lookahead cache.
            SnapshotError: the file cannot be written; an older one of that name is still there.
        """
        self._store().save(os.fspath(path))

    def load_lookahead_cache(self, path: str | os.PathLike[str]) -> None:
        """Restores the lookahead cache from a file; the caches of running requests stay. Generated
        tokens do not depend on it.

        Raises:
            ConfigError: there is no lookahead cache.
            SnapshotError: the file is damaged, of another tokenizer, or too large; the cache is
                unchanged.
        """
        self._store().load(os.fspath(path))

    @property
    def backend(self) -> str:
        """What runs the model: "cuda", or on a CPU "native" (our executor), "torch" or "ipex"."""
        return self._engine_parts().backend

    @property
    def engine(self) -> Engine:
        """The step loop that serves this LLM, for callers who add requests and call `step`
        themselves. It must not be stepped while `generate` or a stream runs."""
        return self._engine_parts().engine

    # -- inside -----------------------------------------------------------------------------

    def _engine_parts(self) -> BuiltEngine:
        if self._built is None:
            raise EngineDeadError("this LLM was closed")
        return self._built

    def _store(self) -> Store:
        store = self._engine_parts().store
        if store is None:
            raise ConfigError("use_lookahead", False, "this engine has no lookahead cache")
        return store

    def _make_requests(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        name_index: bool,
        final_only: bool = True,
    ) -> list[Request]:
        engine = self._engine_parts().engine
        requests = []
        finals: dict[int, SamplingParams] = {}
        for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            if final_only and isinstance(wanted, SamplingParams):
                if id(wanted) not in finals:
                    finals[id(wanted)] = dataclasses.replace(
                        wanted, output_kind=RequestOutputKind.FINAL_ONLY
                    )
                wanted = finals[id(wanted)]
            request_id = str(self._num_requests)
            self._num_requests += 1
            try:
                with prompt_wakeups():
                    requests.append(engine.make_request(request_id, prompt, wanted))
            except RequestError as error:
                raise (error.at_prompt(index) if name_index else error) from None
        return requests

    def _step(self, mine: Set[str]) -> list[RequestOutput]:
        """Runs one step; returns the outputs of `mine` and keeps those of open streams."""
        outputs = []
        with prompt_wakeups():
            seen = self._engine_parts().engine.step()
        for output in seen:
            if output.request_id in mine:
                outputs.append(output)
            else:
                self._inboxes[output.request_id].append(output)
        return outputs

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        engine = self._engine_parts().engine
        indices = {request.request_id: index for index, request in enumerate(requests)}
        finished: dict[str, RequestOutput] = {}
        for request in requests:
            engine.add_request(request)
        progress = _Progress(len(requests), use_tqdm)
        try:
            with _interrupt_between_steps() as interrupted:
                while len(finished) < len(requests) and not interrupted:
                    for output in self._step(indices.keys()):
                        finished[output.request_id] = output
                        progress.add(output)
                        if output.error is not None:
                            index = indices[output.request_id]
                            raise RequestError(
                                "logits_processors", None, output.error, prompt_index=index
                            )
            if interrupted:
                logger.warning("interrupted: unfinished requests are returned as they are")
        finally:
            progress.close()
            for request in requests:
                last = engine.abort(request.request_id)
                if last is not None:
                    finished[request.request_id] = last
        return [finished[request.request_id] for request in requests]


@contextmanager
def _interrupt_between_steps() -> Iterator[list[int]]:
    """Collects Ctrl-C in a list instead of raising it inside a step, which would leave scheduler
    and device in different states. Only the main thread gets signals; in others the list stays
    empty."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)


class _Progress:
    """Progress bar of `generate`: finished prompts, input and output tokens per second."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(
            total=total,
            desc="Processed prompts",
            dynamic_ncols=True,
            disable=not shown,
            postfix="input: 0.0 toks/s, output: 0.0 toks/s",
        )
        self._input = self._output = 0

    def add(self, output: RequestOutput) -> None:
        self._input += len(output.prompt_token_ids)
        self._output += sum(len(c.token_ids) for c in output.outputs)
        if not self._bar.disable:
            seconds = max(self._bar.format_dict["elapsed"], 1e-9)
            self._bar.postfix = (
                f"input: {self._input / seconds:.1f} toks/s, "
                f"output: {self._output / seconds:.1f} toks/s"
            )
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


def _refuse(field: str, value: Any, feature: str) -> None:
    if value is not None:
        raise ConfigError(field, value, f"{feature} is not available yet")
