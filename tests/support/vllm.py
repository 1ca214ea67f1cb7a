"""An in-process vLLM engine on a tiny model, and what tests ask of it."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from stepkernel.program.routing import Reason
from support.golden import ASSETS, prompts

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
    """With several tensor-parallel ranks the model lives in processes of their own, one for each rank."""

    llm: LLM

    @property
    def core(self) -> Any:
        return self.llm.llm_engine

    @property
    def scheduler(self) -> Any:
        return self.core.engine_core.engine_core.scheduler

    def each(self, call: Callable[[Any], Any]) -> list[Any]:
        """What `call` says of the model of every rank."""
        return self.llm.collective_rpc(lambda worker: call(worker.model_runner.model))

    def steps(self) -> dict[str, dict[str, int]]:
        """Steps so far by path and reason, the same on every rank."""
        first, *others = self.each(lambda model: model.counters.routes.as_dict())
        assert all(other == first for other in others)
        return first

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
        chosen = {**DEFAULTS, "additional_config": {"decode_backend": backend}, **options}
        key = (model, repr(sorted(chosen.items())))
        if self._engine is None or key != self._key:
            self.end()
            self._engine = Engine(LLM(model=str(ASSETS / model), **chosen))
            self._key = key
        return self._engine

    def end(self) -> None:
        if self._engine is None:
            return
        self._engine.each(lambda model: model.decode and model.decode.close())
        self._engine.core.engine_core.shutdown()
        self._engine = None
        gc.collect()
        cleanup_dist_env_and_memory()


def counted(engine: Engine, prompts: list[list[int]]) -> dict[str, dict[str, int]]:
    """Steps of a run of `prompts`."""
    before = engine.steps()
    engine.tokens(prompts)
    return {
        kind: {reason: n - before[kind].get(reason, 0) for reason, n in found.items() if n != before[kind].get(reason)}
        for kind, found in engine.steps().items()
    }


def mismatches(engines: Engines, model: str, backend: str, dtype: str, margin: float, **options: Any) -> list[str]:
    """Requests whose first different token was no near tie of the golden logits."""
    golden = prompts(model)
    found = engines.get(model, backend, dtype=dtype, **options).tokens([g["prompt_ids"] for g in golden])
    faults = []
    for case, tokens in zip(golden, found, strict=True):
        wanted = case["greedy_tokens"][:TOKENS]
        different = np.flatnonzero(np.array(tokens) != wanted)
        if different.size:
            top = case["step_top20_logits"][different[0]]
            if top[0] - top[1] > margin:
                faults.append(
                    f"prompt of {len(case['prompt_ids'])}: token {different[0]}, margin {top[0] - top[1]:.3f}"
                )
    return faults
