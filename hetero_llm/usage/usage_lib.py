"""vLLM's path of `UsageContext`."""

from hetero_llm.utils.vllm_names import UsageContext as UsageContext
