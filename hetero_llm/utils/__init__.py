"""Services of the machine for every package: native builds, logs, environment, topology."""

from hetero_llm.utils.vllm_names import FlexibleArgumentParser as FlexibleArgumentParser
from hetero_llm.utils.vllm_names import random_uuid as random_uuid
