"""vLLM's older path of the forms of prompts."""

from hetero_llm.core.inputs import PromptType as PromptType
from hetero_llm.core.inputs import TextPrompt as TextPrompt
from hetero_llm.core.inputs import TokensPrompt as TokensPrompt
