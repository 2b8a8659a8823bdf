"""The interface between the server and an engine: `AsyncLLMEngine`, or a fake one in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hetero_llm.core.histogram import Histogram
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hetero_llm.config.engine_config import EngineConfig
    from hetero_llm.core.pooling import Finish, PoolingInput, PoolingResult
    from hetero_llm.engine.inputs.images import ImageInputs
    from hetero_llm.engine.inputs.input_processor import Prompt
    from hetero_llm.engine.pooling.pooling_inputs import PoolingInputs
    from hetero_llm.engine.text.tokenizer import Tokenizer, TokenizerThreads
    from hetero_llm.pooling.pooling_model import PoolingModel


@dataclass(frozen=True)
class PoolingInfo:
    """Facts about a model that pools: its class, which hidden states become a vector ("CLS", "MEAN"
    or "LAST"), the tasks of `PoolingParams` that it serves, and how long its vectors are."""

    class_name: str
    pooling: str
    tasks: tuple[str, ...]
    size: int

    @staticmethod
    def of(model: PoolingModel) -> PoolingInfo:
        size = len(model.labels) or model.embedding_size
        return PoolingInfo(model.class_name, model.pooling, model.tasks, size)


@dataclass(frozen=True)
class EngineInfo:
    """Facts about an engine that do not change once it is ready.

    `max_model_len` and `block_size` are in tokens. `backend` is "cuda", or on a CPU "native",
    "torch" or "ipex". `started_seconds` has the duration of each part of the start. `offload`
    describes the host memory behind the prefix cache; empty without any. `default_sampling` has
    fields of `SamplingParams` for requests that leave them out. `max_logprobs` is the most
    log-probabilities of a token that a request may ask for. `pooling` describes a model that pools;
    None: the model generates. `num_replicas` engines serve as one; `num_blocks` is that of all.
    """

    model: str
    served_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    backend: str
    started_seconds: dict[str, float] = field(default_factory=dict)
    offload: str = ""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_logprobs: int = 20
    pooling: PoolingInfo | None = None
    num_replicas: int = 1


class ReadyModel(Protocol):
    """What `ModelInfo` takes from an engine that was built."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class ModelInfo:
    """What vLLM's users read from `get_model_config()`; `max_model_len` is in tokens."""

    model: str
    tokenizer: str
    served_model_name: str
    max_model_len: int
    vocab_size: int
    dtype: str
    seed: int

    @staticmethod
    def of(config: EngineConfig, ready: ReadyModel, served_name: str) -> ModelInfo:
        """Of a model that was loaded as `config` says."""
        return ModelInfo(
            model=config.load.model,
            tokenizer=config.load.tokenizer,
            served_model_name=served_name,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            dtype=ready.dtype,
            seed=config.seed,
        )

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True)
class EngineStats:
    """An engine's state as last reported.

    Attributes:
        metrics: `Engine.metrics()` of the last heartbeat.
        num_steps: steps since the start.
        last_step_age: seconds since the engine last showed life.
        queue: requests accepted and not finished.
        histograms: `Engine.histograms()` of the last heartbeat.
        replicas: the metrics of each replica, of which `metrics` are the sums; empty: there is one.
    """

    metrics: dict[str, float]
    num_steps: int
    last_step_age: float
    queue: int
    histograms: dict[str, Histogram] = field(default_factory=dict)
    replicas: tuple[dict[str, float], ...] = ()


class EngineClient(Protocol):
    """An engine seen from an event loop. No call blocks the loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in this process; None if the engine was started without one."""

    @property
    def images(self) -> ImageInputs | None:
        """Prepares images in this process; None if the model takes none."""

    @property
    def pooling_inputs(self) -> PoolingInputs | None:
        """Tokenizes and checks the inputs of a model that pools; None if it generates."""

    @property
    def threads(self) -> TokenizerThreads:
        """The threads in which this process tokenizes; `shutdown` closes them."""

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of one request, as `sampling_params.output_kind` says, until it is
        finished.

        `lora_request` and `prompt_adapter_request` name its adapters; None: the base model.
        `data_parallel_rank` is the number of the replica that serves it; None: the engine chooses.

        Closing the generator aborts the request.

        Raises:
            RequestError: the user's mistake (a bad value, a prompt that is too long).
            OverloadedError: too many requests wait; `retry_after` is in seconds.
            DuplicateRequestError: a running request has this id.
            EngineDeadError: the engine cannot serve, or died in mid-stream.
        """

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter before a request needs it.

        Raises:
            AdapterError: it cannot be served.
        """

    async def remove_lora(self, lora_id: int) -> bool:
        """Forgets the adapter with this number; its requests go on."""

    async def add_prompt_adapter(self, request: PromptAdapterRequest) -> None:
        """Reads a prompt adapter before a request needs it.

        Raises:
            AdapterError: it cannot be served.
        """

    async def num_virtual_tokens(self, path: str) -> int:
        """Of the prompt adapter in a folder, or of a hub id.

        Raises:
            AdapterError: there is none.
        """

    async def pool(
        self,
        request_id: str,
        inputs: Sequence[PoolingInput],
        finish: Finish,
        *,
        data_parallel_rank: int | None = None,
    ) -> PoolingResult:
        """The pooled values of inputs that `pooling_inputs` has made.

        Cancelling the call aborts the request. `data_parallel_rank`: as `generate`.

        Raises:
            RequestError: no replica has this number.
            HeteroLLMError: a value is no finite number, or the request was aborted.
            OverloadedError, DuplicateRequestError, EngineDeadError: as `generate`.
        """

    async def abort(self, request_id: str) -> None:
        """Ends a request: its stream ends with finish_reason "abort". Unknown ids are ignored."""

    def stats(self) -> EngineStats: ...

    def check_health(self) -> object:
        """Returns if the engine is well.

        Raises:
            EngineDeadError: it has ended or was shut down.
            EngineHungError: it has shown no life for longer than its step timeout.
        """

    async def reset_prefix_cache(self) -> object:
        """Drops all cached prefixes."""

    def shutdown(self, drain_seconds: float) -> Awaitable[None]:
        """Refuses new requests, gives running ones this long to finish, then ends the engine.

        Streams that are still open then raise `EngineDeadError`.
        """
