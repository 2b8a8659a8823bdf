"""`LLMEngine`: an engine in this process whose steps the caller drives, as vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import (
    DuplicateRequestError,
    EngineDeadError,
    RequestError,
    refuse_later,
)
from hetero_llm.core.inputs import PromptType
from hetero_llm.core.lora import LoRARequest, check_lora_request
from hetero_llm.core.metrics import Metric
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine.arg_utils import EngineArgs
from hetero_llm.engine.engine_client import ModelInfo
from hetero_llm.engine.factory import BuiltEngine, build_engine, free_unreachable
from hetero_llm.engine.inputs.input_processor import parse_prompt
from hetero_llm.engine.metric_objects import metric_objects
from hetero_llm.engine.vllm_missing import refuse_options, why_missing
from hetero_llm.utils.gc_control import prompt_wakeups, serve_promptly


class LLMEngine:
    """Requests go in with `add_request`, their outputs come out of `step`; one thread at a time.

    Args:
        engine_args: `EngineArgs`, or the arguments by name.

    Raises:
        ConfigError: an argument is wrong.
        ModelLoadError: the model cannot be loaded.
    """

    def __init__(self, engine_args: EngineArgs | Mapping[str, Any]) -> None:
        if not isinstance(engine_args, EngineArgs):
            engine_args = EngineArgs(**engine_args)
        config = EngineConfig.from_args(engine_args.resolved())
        config.check_one_replica()
        serve_promptly()
        with prompt_wakeups():
            built = build_engine(config, show_progress=sys.stderr.isatty())
        self._built: BuiltEngine | None = built
        self._running: set[str] = set()
        served = next(iter(engine_args.served_model_name), config.load.model)
        self._model = ModelInfo.of(config, built, served)

    @classmethod
    def around(cls, built: BuiltEngine, model: ModelInfo) -> LLMEngine:
        """Drives an engine that was built elsewhere."""
        made = cls.__new__(cls)
        made._built, made._running, made._model = built, set(), model
        return made

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: Any = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        """The constructor by vLLM's name. `usage_context` has no meaning here: nothing is
        reported. The engine is always in this process, whatever `enable_multiprocessing` is."""
        refuse_later("stat_loggers", stat_loggers, "a logger of statistics of the user's own")
        return cls(engine_args)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: None = None,
    ) -> None:
        """Queues a request.

        Args:
            params: the request keeps a copy. `output_kind` says what `step` returns.
            arrival_time: not used: a request arrives with this call.
            lora_request: the adapter of the request; needs `enable_lora`.
            prompt_adapter_request: its prompt adapter; needs `enable_prompt_adapter`.
            priority: another one than 0 is not available yet.
            tokenization_kwargs: must be empty.
            trace_headers: not available yet.

        Raises:
            RequestError: the prompt or a parameter is wrong.
            DuplicateRequestError: a running request has this id.
        """
        refuse_later("priority", priority or None, "priority scheduling")
        refuse_later("trace_headers", trace_headers, "tracing of requests without a server")
        refuse_options(tokenization_kwargs)
        engine = self._parts().engine
        if not isinstance(request_id, str) or not request_id:
            raise RequestError("request_id", request_id, "must be a string that is not empty")
        if request_id in self._running:
            raise DuplicateRequestError(request_id)
        with prompt_wakeups():
            request = engine.make_request(
                request_id, parse_prompt(prompt), params, lora_request, prompt_adapter_request
            )
        engine.add_request(request)
        self._running.add(request_id)

    def step(self) -> list[RequestOutput]:
        """Computes one step. Returns the outputs of requests that it brought forward; [] without
        any."""
        with prompt_wakeups():
            outputs = self._parts().engine.step()
        self._running.difference_update(one.request_id for one in outputs if one.finished)
        return outputs

    def abort_request(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Ends requests, which have no further output. Unknown ids are left alone. `internal`:
        without effect, since ids are the caller's own here."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if one in self._running:
                self._running.remove(one)
                self._parts().engine.abort(one)

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        return len(self._running)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer, or None."""
        tokenizer = self._parts().tokenizer
        return None if tokenizer is None else tokenizer.hf

    @property
    def tokenizer(self) -> Any:
        """`get_tokenizer()`."""
        return self.get_tokenizer()

    @property
    def model_config(self) -> ModelInfo:
        return self._model

    def get_model_config(self) -> ModelInfo:
        return self._model

    def check_health(self) -> None:
        """Raises:
        EngineDeadError: the engine was closed, or a step has failed.
        """
        self._parts().engine.check_alive()

    def metrics(self) -> dict[str, float]:
        """See `LLM.metrics`."""
        return self._parts().metrics()

    def get_metrics(self) -> list[Metric]:
        """See `LLM.get_metrics`."""
        labels = {"model_name": self._model.served_model_name, "engine": "0"}
        return metric_objects(self.metrics(), self._parts().engine.histograms(), labels)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter before a request needs it; True, as vLLM's.

        Raises:
            AdapterError: it cannot be served.
        """
        self._parts().engine.adapters.open(check_lora_request(lora_request))
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forgets the adapter with this number; False if there is none. Its requests go on."""
        adapters = self._parts().engine.adapters
        name = adapters.name_of(lora_id)
        if name is not None:
            adapters.forget(name)
        return name is not None

    def list_loras(self) -> set[int]:
        """The numbers of the known adapters."""
        known = self._parts().engine.adapters.names()
        return {ref.request.lora_int_id for ref in known.values()}

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """See `LLM.reset_prefix_cache`."""
        self._parts().engine.reset_prefix_cache()
        return True

    def reset_mm_cache(self) -> None:
        """See `LLM.reset_mm_cache`."""
        self._parts()

    def reset_encoder_cache(self) -> None:
        """See `LLM.reset_encoder_cache`."""
        self._parts()

    def shutdown(self) -> None:
        """Frees model and KV cache; further calls raise `EngineDeadError`."""
        if self._built is None:
            return
        device = self._built.device
        self._built.engine.shut_down()
        self._built = None
        self._running.clear()
        free_unreachable(device)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(why_missing("LLMEngine", name))

    def _parts(self) -> BuiltEngine:
        if self._built is None:
            raise EngineDeadError("this LLMEngine was shut down")
        return self._built
