"""An in-process vLLM engine on a tiny model, and what tests ask of it."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from stepkernel.program.routing import Reason
from support.golden import ASSETS

TOKENS = 32
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "seed": 0,
    "enforce_eager": True,
    "disable_log_stats": True,
    "tokenizer_mode": "hf",
}


def greedy(tokens: int = TOKENS, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **options)


@dataclass
class Engine:
    llm: LLM

    @property
    def core(self) -> Any:
        return self.llm.llm_engine

    @property
    def model(self) -> Any:
        executor = self.core.engine_core.engine_core.model_executor
        worker = executor.driver_worker
        return getattr(worker, "worker", worker).model_runner.model

    def steps(self) -> dict[str, dict[str, int]]:
        """Steps so far by path and reason."""
        return self.model.counters.routes.as_dict()

    def total(self, kind: str, *reasons: Reason) -> int:
        found = self.steps()[kind]
        return sum(found.get(reason.value, 0) for reason in reasons) if reasons else sum(found.values())

    def outputs(self, prompts: Sequence[Sequence[int]], sampling: Any = None) -> list[Any]:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(requests, sampling or greedy(), use_tqdm=False)

    def tokens(self, prompts: Sequence[Sequence[int]], sampling: Any = None) -> list[list[int]]:
        return [list(found.outputs[0].token_ids) for found in self.outputs(prompts, sampling)]


class Engines:
    """The engine last asked for stays; vLLM keeps process-wide state, so two never live together."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._engine: Engine | None = None

    def get(self, model: str, backend: str = "latency_specialized", **options: Any) -> Engine:
        key = (model, backend, repr(sorted(options.items())))
        if self._engine is None or key != self._key:
            self.end()
            chosen = {**DEFAULTS, "additional_config": {"decode_backend": backend}, **options}
            self._engine = Engine(LLM(model=str(ASSETS / model), **chosen))
            self._key = key
        return self._engine

    def end(self) -> None:
        if self._engine is None:
            return
        decode = self._engine.model.decode
        if decode is not None:
            decode.close()
        self._engine = None
        gc.collect()
        cleanup_dist_env_and_memory()
