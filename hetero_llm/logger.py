"""vLLM's path of `init_logger`."""

from hetero_llm.utils.vllm_names import init_logger as init_logger
