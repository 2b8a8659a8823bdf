"""`LLM`: offline generation, with the interface of the TACO-LLM manual and of vLLM."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Unpack

from tqdm import tqdm

from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import (
    ConfigError,
    EngineDeadError,
    PoolingError,
    PromptError,
    RequestError,
    SamplingError,
    refuse_later,
)
from hetero_llm.core.inputs import PromptType
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.metrics import Metric
from hetero_llm.core.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from hetero_llm.core.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from hetero_llm.core.pooling_params import PoolingParams
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from hetero_llm.engine.arg_utils import EngineArgs
from hetero_llm.engine.builders.build_pooling import BuiltPooling
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.engine_client import ModelInfo
from hetero_llm.engine.factory import BuiltEngine, build, free_unreachable
from hetero_llm.engine.inputs.chat_messages import for_template
from hetero_llm.engine.inputs.input_processor import (
    BothAdapters,
    GuidedOptions,
    Prompt,
    is_one_prompt,
    pair_both_adapters,
    pair_params,
    parse_prompts,
    with_guided_options,
)
from hetero_llm.engine.interrupts import interrupt_between_steps
from hetero_llm.engine.llm_engine import LLMEngine
from hetero_llm.engine.metric_objects import metric_objects
from hetero_llm.engine.pooling_calls import PoolingCalls
from hetero_llm.engine.vllm_missing import refuse_options, why_missing
from hetero_llm.utils.gc_control import prompt_wakeups, serve_promptly

if TYPE_CHECKING:
    from hetero_llm.config.engine_arg_types import EngineArgTypes
    from hetero_llm.spec_decode.lookahead.store import Store

logger = logging.getLogger(__name__)


# large: one method for each call of vLLM's LLM.
class LLM:
    """A model and everything needed to generate text with it, in this process.

    Args:
        model: a folder in Hugging Face layout, a GGUF file, a hub id, or "demo" for the embedded
            model.
        tokenizer: a folder or hub id; None: the model's.
        engine_args: see docs/flags.md; unknown names are errors.

    Raises:
        ConfigError: an argument is wrong.
        ModelLoadError: the model cannot be loaded.

    A context manager: leaving it frees the model and the KV cache.
    """

    def __init__(
        self, model: str, tokenizer: str | None = None, **engine_args: Unpack[EngineArgTypes]
    ) -> None:
        args = EngineArgs(model, tokenizer, **engine_args)
        config = EngineConfig.from_args(args.resolved())
        config.check_one_replica()
        serve_promptly()
        with prompt_wakeups():
            built = build(config, show_progress=sys.stderr.isatty())
        self._built: BuiltEngine | BuiltPooling | None = built
        self._pooling = PoolingCalls(built) if isinstance(built, BuiltPooling) else None
        served = next(iter(args.served_model_name), config.load.model)
        self._metric_labels = {"model_name": served, "engine": "0"}
        self._num_requests = 0
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # of open streams
        self._llm_engine: LLMEngine | None = None
        if isinstance(built, BuiltEngine):
            self._llm_engine = LLMEngine.around(built, ModelInfo.of(config, built, served))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """The constructor, for arguments that are an object."""
        given = engine_args.changed()
        if engine_args.served_model_name:
            given["served_model_name"] = engine_args.served_model_name
        return cls(given.pop("model"), **given)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees model and KV cache; further calls raise `EngineDeadError`."""
        device = "" if self._built is None else self._built.device
        if self._built is not None:
            self._built.engine.shut_down()
        self._built = self._pooling = self._llm_engine = None
        free_unreachable(device)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_adapter_request: PromptAdapterRequest
        | Sequence[PromptAdapterRequest | None]
        | None = None,
        guided_options_request: GuidedOptions | Sequence[GuidedOptions] | None = None,
        priority: Sequence[int] | None = None,
        *,
        inputs: PromptType | Sequence[PromptType] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates a continuation of each prompt; prompts run together as far as memory allows.

        Args:
            prompts: a string, a dict with "prompt" or "prompt_token_ids" (and "cache_salt", and
                "multi_modal_data": {"image": one or a list}), token ids, or a list of those.
            sampling_params: one for all prompts or one each; default
                `get_default_sampling_params()`.
            prompt_token_ids: token ids instead of, or along with, text.
            use_tqdm: show progress and tokens per second; a class or function like `tqdm` shows
                them its way.
            lora_request: the adapter of all prompts, or one or None for each; needs
                `enable_lora`.
            prompt_adapter_request: the prompt adapter of all prompts, or one or None for each;
                needs `enable_prompt_adapter`.
            guided_options_request: what the outputs must follow, one for all prompts or one each;
                today's name is `SamplingParams.structured_outputs`.
            priority: of each prompt; other ones than 0 are not available yet.
            inputs: an older name of `prompts`.
            tokenization_kwargs: must be empty.

        Returns:
            One finished output per prompt, in order. After Ctrl-C an unfinished one has the text
            so far and finish_reason "abort".

        Raises:
            RequestError: a prompt or parameter is wrong; names the prompt's index. No prompt has
                been started.
        """
        refuse_later("priority", priority if any(priority or ()) else None, "priority scheduling")
        refuse_options(tokenization_kwargs)
        if inputs is not None:
            if prompts is not None:
                raise PromptError("inputs", inputs, "is another name of prompts, also given")
            prompts = inputs
        parsed = parse_prompts(prompts, prompt_token_ids)
        is_list = not is_one_prompt(prompts, prompt_token_ids)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = pair_params(sampling_params, len(parsed))
        if guided_options_request is not None:
            params = with_guided_options(params, guided_options_request)
        adapters = pair_both_adapters(lora_request, prompt_adapter_request, len(parsed))
        requests = self._make_requests(parsed, params, is_list, adapters=adapters)
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        *,
        chat_template_content_format: str = "auto",
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_adapter_request: PromptAdapterRequest
        | Sequence[PromptAdapterRequest | None]
        | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of conversations, through the chat template.

        Args:
            messages: dicts with "role" and "content", a text or a list of parts: {"type": "text",
                "text": ...}, and for a model that takes images {"type": "image", "image": ...} and
                {"type": "image_url", "image_url": {"url": "data:image/..."}}.
            lora_request: as of `generate`.
            chat_template: a Jinja template instead of the tokenizer's own.
            add_generation_prompt: open the assistant's turn.
            chat_template_content_format: how the template sees contents: "string" joins the texts
                of parts with newlines, "openai" makes every content a list of parts; "auto" is
                "openai" for a model that takes images, else "string".
            continue_final_message: leave the last message open; needs add_generation_prompt=False.
            tools: described to the template.
            chat_template_kwargs: variables of the template.
            mm_processor_kwargs, tokenization_kwargs: must be empty.
            prompt_adapter_request: as of `generate`.

        Raises:
            RequestError: no tokenizer, no template, or a conversation it refuses.
        """
        refuse_options(tokenization_kwargs, images=mm_processor_kwargs)
        tokenizer = self._engine_parts().tokenizer
        images_in = self._engine_parts().images
        fetch = None if images_in is None else images_in.fetcher.fetch
        if tokenizer is None:
            raise RequestError("messages", messages, "chat needs a tokenizer")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages", messages, "must be a conversation or a list of those")
        several = not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        options = {**(chat_template_kwargs or {}), "continue_final_message": continue_final_message}
        if tools is not None:
            options["tools"] = list(tools)
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                conversation, images = for_template(
                    conversation, chat_template_content_format, fetch=fetch
                )
                token_ids = tokenizer.apply_chat_template(
                    conversation,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    options=options,
                )
            except RequestError as error:
                raise (error.at_prompt(index) if several else error) from None
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
            prompts.append(Prompt(text, token_ids, images=images))
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = pair_params(sampling_params, len(prompts))
        adapters = pair_both_adapters(lora_request, prompt_adapter_request, len(prompts))
        requests = self._make_requests(prompts, params, several, adapters=adapters)
        return self._run(requests, use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Searches the `params.beam_width` most likely continuations of each prompt.

        `concurrency_limit` changes nothing: prompts run together as far as memory allows.

        The search is that of transformers' `generate`, as with `use_beam_search`: scores are
        divided by (generated length) ** length_penalty.

        Raises:
            RequestError: a prompt or parameter is wrong.
        """
        if not isinstance(params, BeamSearchParams):
            raise SamplingError("params", params, "must be a BeamSearchParams")
        tokenizer = self._engine_parts().tokenizer
        found = []
        for output in self.generate(
            prompts, params.sampling_params(), use_tqdm=use_tqdm, lora_request=lora_request
        ):
            beams = []
            for one in output.outputs:
                tokens = [*output.prompt_token_ids, *one.token_ids]
                text = None
                if tokenizer is not None:
                    text = tokenizer.decode(tokens, skip_special_tokens=False)
                beams.append(
                    BeamSearchSequence(
                        tokens,
                        one.logprobs or [],
                        output.lora_request,
                        cum_logprob=one.cumulative_logprob or 0.0,
                        text=text,
                        finish_reason=one.finish_reason,
                        stop_reason=one.stop_reason,
                    )
                )
            found.append(BeamSearchOutput(beams))
        return found

    def stream(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields the growing output of one prompt, per `sampling_params.output_kind`.

        Closing the iterator early aborts the request.
        """
        params = sampling_params or self.get_default_sampling_params()
        (request,) = self._make_requests(
            parse_prompts(prompt), [params], False, final_only=False,
            adapters=pair_both_adapters(lora_request, prompt_adapter_request, 1),
        )  # fmt: skip
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
                    raise RequestError(_failing_field(request), None, output.error)
                finished = output.finished
                yield output
        finally:
            del self._inboxes[request.request_id]
            engine.abort(request.request_id)

    # -- pooling models ---------------------------------------------------------------------

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt.

        Args:
            prompts: as of `generate`.
            truncate_prompt_tokens: see `PoolingParams`; comes before its field.
            pooling_params: one for all prompts or one each.

        Raises:
            RequestError: a prompt or parameter is wrong, or the model makes no embeddings.
        """
        refuse_later("lora_request", lora_request, "LoRA")
        refuse_options(tokenization_kwargs)
        options = {"truncate_prompt_tokens": truncate_prompt_tokens}
        return self._pooling_calls("embed").embed(prompts, pooling_params, options, use_tqdm)

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's classes for each prompt.

        Raises:
            RequestError: a prompt or parameter is wrong, or the model has no classes.
        """
        refuse_later("lora_request", lora_request, "LoRA")
        refuse_options(tokenization_kwargs)
        return self._pooling_calls("classify").classify(prompts, pooling_params, {}, use_tqdm)

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The pooled values of each prompt as a tensor: an embedding, or probabilities of classes.

        Args:
            pooling_task: "embed" or "classify"; None: that of `pooling_params`, else the model's.

        Raises:
            RequestError: a prompt or parameter is wrong, or the model does not serve the task.
        """
        refuse_later("lora_request", lora_request, "LoRA")
        refuse_options(tokenization_kwargs)
        calls = self._pooling_calls("encode")
        return calls.encode(prompts, pooling_params, pooling_task, use_tqdm)

    def score(
        self,
        data_1: PromptType | Sequence[PromptType],
        data_2: PromptType | Sequence[PromptType],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
        chat_template: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit: the score of a cross-encoder, or the cosine of two embeddings.

        Args:
            data_1: one text, which is compared with each of `data_2`, or as many as there.

        Raises:
            RequestError: a text or parameter is wrong, or the model gives no scores.
        """
        refuse_later("lora_request", lora_request, "LoRA")
        refuse_options(tokenization_kwargs)
        refuse_later("chat_template", chat_template, "a template of pairs")
        options = {"truncate_prompt_tokens": truncate_prompt_tokens}
        calls = self._pooling_calls("score")
        return calls.score(data_1, data_2, pooling_params, options, use_tqdm)

    # -- the engine -------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer, or None."""
        tokenizer = self._parts().tokenizer
        return None if tokenizer is None else tokenizer.hf

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Fields that the model's generation_config.json sets, or `override_generation_config`."""
        return dict(self._engine_parts().default_sampling)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without any: `SamplingParams()` with `default_sampling`."""
        return SamplingParams(**self.default_sampling)

    def get_metrics(self) -> list[Metric]:
        """Counters since start, gauges of the present state and histograms, as vLLM's objects of
        `hetero_llm.v1.metrics.reader`."""
        histograms = self._parts().engine.histograms()
        return metric_objects(self.metrics(), histograms, self._metric_labels)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of `get_metrics` by the engine's names."""
        return self._parts().metrics()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Drops all cached prefixes, those in host memory too; a model that pools caches none.

        The arguments, vLLM's, ask for what is done anyway: running requests do not prevent it.
        True, as vLLM's.
        """
        built = self._parts()
        if not isinstance(built, BuiltPooling):
            built.engine.reset_prefix_cache()
        return True

    def reset_mm_cache(self) -> None:
        """Does nothing: prepared images are kept in the prefix cache alone."""
        self._parts()

    def reset_encoder_cache(self) -> None:
        """Does nothing: what an encoder has made of images is kept in the prefix cache alone."""
        self._parts()

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
        return self._parts().backend

    @property
    def engine(self) -> Engine:
        """The step loop that serves this LLM, for callers who add requests and call `step`
        themselves. It must not be stepped while `generate` or a stream runs."""
        return self._engine_parts().engine

    @property
    def llm_engine(self) -> LLMEngine:
        """The same engine as vLLM's users know it; as of `engine`."""
        self._engine_parts()
        assert self._llm_engine is not None, "an engine that generates has one"
        return self._llm_engine

    @property
    def model_config(self) -> ModelInfo:
        """Facts about the model."""
        return self.llm_engine.model_config

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the model is for: "generate", or tasks of `PoolingParams`."""
        built = self._parts()
        return built.model.tasks if isinstance(built, BuiltPooling) else ("generate",)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(why_missing("LLM", name))

    # -- inside -----------------------------------------------------------------------------

    def _parts(self) -> BuiltEngine | BuiltPooling:
        if self._built is None:
            raise EngineDeadError("this LLM was closed")
        return self._built

    def _engine_parts(self) -> BuiltEngine:
        built = self._parts()
        if isinstance(built, BuiltPooling):
            raise PoolingError(
                "task",
                "generate",
                f"{built.model.class_name} pools and generates no text; "
                f"it serves {' and '.join(map(repr, built.model.tasks))}",
            )
        return built

    def _pooling_calls(self, call: str) -> PoolingCalls:
        self._parts()
        if self._pooling is None:
            raise PoolingError(
                "task",
                call,
                "this model generates text; load one that pools, or make it pool with "
                "LLM(..., runner='pooling')",
            )
        return self._pooling

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
        *,
        adapters: list[BothAdapters],
    ) -> list[Request]:
        engine = self._engine_parts().engine
        requests = []
        finals: dict[int, SamplingParams] = {}
        for index, (prompt, wanted, both) in enumerate(zip(prompts, params, adapters, strict=True)):
            if final_only and isinstance(wanted, SamplingParams):
                if id(wanted) not in finals:
                    finals[id(wanted)] = wanted.clone()
                    finals[id(wanted)].output_kind = RequestOutputKind.FINAL_ONLY
                wanted = finals[id(wanted)]
            request_id = str(self._num_requests)
            self._num_requests += 1
            try:
                with prompt_wakeups():
                    requests.append(engine.make_request(request_id, prompt, wanted, *both))
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

    def _run(
        self, requests: list[Request], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        engine = self._engine_parts().engine
        indices = {request.request_id: index for index, request in enumerate(requests)}
        finished: dict[str, RequestOutput] = {}
        for request in requests:
            engine.add_request(request)
        progress = _Progress(len(requests), use_tqdm)
        try:
            with interrupt_between_steps() as interrupted:
                while len(finished) < len(requests) and not interrupted:
                    for output in self._step(indices.keys()):
                        finished[output.request_id] = output
                        progress.add(output)
                        if output.error is not None:
                            index = indices[output.request_id]
                            field = _failing_field(requests[index])
                            raise RequestError(field, None, output.error, prompt_index=index)
            if interrupted:
                logger.warning("interrupted: unfinished requests are returned as they are")
        finally:
            progress.close()
            for request in requests:
                last = engine.abort(request.request_id)
                if last is not None:
                    finished[request.request_id] = last
        return [finished[request.request_id] for request in requests]


class _Progress:
    """Progress bar of `generate`: finished prompts, input and output tokens per second."""

    def __init__(self, total: int, shown: bool | Callable[..., Any]) -> None:
        make_bar = shown if callable(shown) else tqdm
        self._bar = make_bar(
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


def _failing_field(request: Request) -> str:
    """The field for which a request has failed while it ran."""
    if request.failed_field is not None:
        return request.failed_field
    return "structured_outputs" if request.params.constrains else "logits_processors"
