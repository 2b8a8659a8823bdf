"""vLLM's path of the objects that `LLM.get_metrics` returns."""

from hetero_llm.core.metrics import Counter as Counter
from hetero_llm.core.metrics import Gauge as Gauge
from hetero_llm.core.metrics import HistogramMetric as Histogram
from hetero_llm.core.metrics import Metric as Metric
from hetero_llm.core.metrics import Vector as Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
