"""Services of the machine for every package: native builds, logs, environment, topology."""

from hetero_llm.utils.vllm_names import FlexibleArgumentParser as FlexibleArgumentParser
from hetero_llm.utils.vllm_names import cleanup_dist_env_and_memory as cleanup_dist_env_and_memory
from hetero_llm.utils.vllm_names import init_logger as init_logger
from hetero_llm.utils.vllm_names import random_uuid as random_uuid
