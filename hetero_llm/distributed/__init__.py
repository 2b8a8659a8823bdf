"""Several processes that run one model: their life, the channel of steps, collectives."""

from hetero_llm.utils.vllm_names import cleanup_dist_env_and_memory as cleanup_dist_env_and_memory
