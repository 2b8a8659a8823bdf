"""vLLM's second path of `cleanup_dist_env_and_memory`."""

from hetero_llm.utils.vllm_names import cleanup_dist_env_and_memory as cleanup_dist_env_and_memory
