"""vLLM's path of its argument parser."""

from hetero_llm.utils.vllm_names import FlexibleArgumentParser as FlexibleArgumentParser
