"""The JSON objects of the API: the fields of requests and of responses.

Every field of a request may be null, which means that it was not given. Fields of features that do
not exist yet are declared, so that they can be refused by name; see `UNAVAILABLE`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

# requests


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str | None = None
    json_schema: Any = None
    structures: Any = None
    triggers: Any = None
    format: Any = None


# large: one field for each parameter of the public API.
class Generation(msgspec.Struct, kw_only=True):
    """The fields that completions and chats share. Names are OpenAI's, vLLM's and TACO-LLM's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    use_beam_search: bool | None = None
    no_repeat_ngram_size: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    num_speculative_tokens: int | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    response_format: ResponseFormat | None = None
    # Hints and labels that change no token.
    user: str | None = None
    session_id: str | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    parallel_tool_calls: bool | None = None
    # What the output must follow, beside response_format.
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    stream_interval: int | None = None
    # Not available.
    logits_processors: Any = None
    prompt_embeds: Any = None
    logprob_token_ids: Any = None
    lora_request: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    media_io_kwargs: Any = None
    watermarking: Any = None
    return_prompt_text: Any = None


class CompletionRequest(Generation, kw_only=True):
    prompt: str | list[Any] | None = None
    echo: bool | None = None
    logprobs: int | bool | None = None
    suffix: str | None = None


class GenerateRequest(Generation, kw_only=True):
    """The request of vLLM's first server, whose fields are those of `SamplingParams`."""

    prompt: str | None = None
    logprobs: int | bool | None = None


class ImageUrl(msgspec.Struct, kw_only=True):
    """`detail` has no effect: the model's own processor decides on the resolution."""

    url: str | None = None
    detail: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    id: str | None = None
    type: str | None = None
    index: int | None = None
    function: FunctionCall | None = None


class Message(msgspec.Struct, kw_only=True):
    """A message of a conversation. Fields of earlier responses, ours and other servers', are
    accepted."""

    role: str | None = None
    content: str | list[ContentPart | str] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


# large: one field for each parameter of the public API.
class ChatRequest(Generation, kw_only=True):
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    prediction: Any = None
    verbosity: Any = None
    include_reasoning: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    # Not available.
    documents: Any = None
    echo: bool | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None
    mm_processor_kwargs: Any = None


# Either a prompt, or a conversation with the fields of a `ChatRequest`.
class TokenizeRequest(msgspec.Struct, kw_only=True):
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: Any = None
    tools: Any = None
    tool_choice: Any = None
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None


_OLD_TOOLS = "the old form of tool calls, before tools,"
UNAVAILABLE = {
    "logits_processors": "a logits processor over HTTP",
    "prompt_embeds": "a prompt of embeddings",
    "logprob_token_ids": "log-probabilities of chosen tokens",
    "lora_request": "an adapter beside the model (its name is the model's)",
    "kv_transfer_params": "KV transfer",
    "ec_transfer_params": "the transfer of encoders' outputs",
    "vllm_xargs": "passing arguments of vLLM's plug-ins",
    "watermarking": "a watermark",
    "return_prompt_text": "the text of the prompt in the response (/tokenize gives its tokens)",
    "suffix": "inserting text before a suffix",
    "documents": "retrieval through the chat template",
    "functions": _OLD_TOOLS,
    "function_call": _OLD_TOOLS,
    "audio": "audio",
    "web_search_options": "web search",
    "mm_processor_kwargs": "input other than text",
    "thinking_token_budget": "a limit on the tokens of reasoning",
    "repetition_detection": "ending a text that repeats itself",
    "media_io_kwargs": "another way to read images",
}
"""Request fields of features that are not available, and what messages call the feature."""


# responses
#
# A field that a response has nothing to say in is null where vLLM sends null, so that clients find
# the attribute. UNSET fields are left out.


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token; the first prompt token has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | UnsetType | None = UNSET
    timeout: bool | UnsetType = UNSET


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None


class CompletionChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None


class Generated(msgspec.Struct):
    """The answer of /generate: the prompt with its continuation, for each sequence."""

    text: list[str]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ResponseToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class ResponseMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    timeout: bool | UnsetType = UNSET


class Chat(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The first one of a call has id, type and name; later ones more of the arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    timeout: bool | UnsetType = UNSET


class Chunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
