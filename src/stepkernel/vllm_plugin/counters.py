"""Steps by route, reason and time: for Prometheus and for the log."""

import time
from collections import Counter, defaultdict

from prometheus_client import Counter as Metric
from prometheus_client import Histogram
from vllm.logger import init_logger

from stepkernel.program.routing import Reason, Route, RouteCounter

logger = init_logger("vllm.stepkernel")

LOG_SECONDS = 10.0
_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0)

# One set per process, in prometheus_client's default registry, which vLLM's endpoint exports.
_STEPS = Metric("stepkernel_steps", "Steps of the model by path and reason.", ["route", "reason"])
_SECONDS = Histogram("stepkernel_step_seconds", "Time of the model's part of a step.", ["route"], buckets=_BUCKETS)
# What batch invariance costs: steps with prompts in them, which the standard path would have taken in one piece.
_INVARIANT_TOKENS = Metric("stepkernel_invariant_tokens", "Tokens computed one at a time for batch invariance.")
_INVARIANT_SECONDS = Metric("stepkernel_invariant_seconds", "Time that these tokens took.")


class StepCounters:
    """Counts every step that vLLM schedules; `routes` holds this model's own totals.

    Tensor-parallel ranks make the same steps, so one of them (`exported`) tells Prometheus and the log.
    """

    def __init__(self, exported: bool = True) -> None:
        self.routes = RouteCounter()
        self._exported = exported
        self._recent: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tokens = 0  # one at a time
        self._logged = time.monotonic()

    def count(self, taken: Route, seconds: float, tokens: int) -> None:
        self.routes.count(taken)
        if not self._exported:
            return
        _STEPS.labels(taken.kind, taken.reason.name.lower()).inc()
        if taken.reason is Reason.INVARIANT:  # many native steps
            _INVARIANT_TOKENS.inc(tokens)
            _INVARIANT_SECONDS.inc(seconds)
            self._tokens += tokens
        else:
            _SECONDS.labels(taken.kind).observe(seconds)
        label = f"{taken.kind} ({taken.reason.value})"
        self._recent[label] += 1
        self._seconds[label] += seconds
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS:
            logger.info("Steps: %s", ", ".join(self._line(label) for label in sorted(self._recent)))
            self._recent.clear()
            self._seconds.clear()
            self._tokens = 0
            self._logged = now

    def _line(self, label: str) -> str:
        count = self._recent[label]
        line = f"{label} {count} x {1e3 * self._seconds[label] / count:.2f} ms"
        if Reason.INVARIANT.value in label:
            line += f", {self._tokens} tokens, {1e3 * self._seconds[label] / self._tokens:.2f} ms each"
        return line
