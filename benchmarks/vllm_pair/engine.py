"""One vLLM engine in a process of its own, and what the benchmark asks of it."""

import multiprocessing
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Literal

Arm = Literal["latency_specialized", "auto compiled", "auto eager"]
ARMS: tuple[Arm, ...] = ("latency_specialized", "auto compiled", "auto eager")
MAX_LENGTH = 1024
MAX_REQUESTS = 8
DRAFTS = 7
SETTLING = 4  # steps before a turn's: another process had the processors

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def environment(arm: Arm, threads: int) -> dict[str, str]:
    """OpenMP's threads of the standard path may spin between two products, those beside a native step must sleep."""
    found = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    if arm == "latency_specialized":
        found["OMP_WAIT_POLICY"] = "passive"
    return found


@dataclass(frozen=True)
class Block:
    """Milliseconds between two tokens of all running requests, without prefill and warm-up; the first request's ids."""

    latencies: list[float]
    tokens: list[int]
    steps: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Turn:
    """Milliseconds of a token of a request, and rounds by number of drafts so far."""

    pace: float
    rounds: list[int]


class Engine:
    """The child's end: vLLM in this process, greedy, a step at a time."""

    def __init__(self, model: str, arm: Arm, threads: int, length: int = MAX_LENGTH, draft: str | None = None) -> None:
        from vllm import LLM

        from stepkernel.vllm_plugin.options import speculation

        started = time.perf_counter()
        backend = "latency_specialized" if arm == "latency_specialized" else "auto"
        options: dict[str, Any] = {} if draft is None else speculation(draft, DRAFTS)
        additional = {**options.pop("additional_config", {}), "decode_backend": backend, "decode_threads": threads}
        self.llm = LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=length,
            max_num_seqs=MAX_REQUESTS,
            seed=0,
            enforce_eager=arm != "auto compiled",
            disable_log_stats=True,
            skip_tokenizer_init=True,
            additional_config=additional,
            **options,
        )
        self.core = self.llm.llm_engine
        worker = self.core.engine_core.engine_core.model_executor.driver_worker
        self.model = getattr(worker, "worker", worker).model_runner.model
        self.load_seconds = time.perf_counter() - started
        self._length = length
        self._name = 0
        self._tokens: dict[str, int] = {}

    def facts(self) -> dict[str, Any]:
        import torch
        from vllm import __version__

        configuration = self.core.vllm_config.compilation_config
        return {
            "vllm": __version__,
            "torch": torch.__version__,
            "compilation_mode": getattr(configuration.mode, "name", str(configuration.mode)),
            "load_seconds": self.load_seconds,
            "memory_mib": memory(),
        }

    def block(self, requests: int, tokens: int, warm_up: int) -> Block:
        from vllm import SamplingParams

        vocab = self.model.config.vocab_size
        sampling = SamplingParams(temperature=0, max_tokens=tokens + warm_up + 1, ignore_eos=True, detokenize=False)
        before = self.model.counters.routes.as_dict()
        for index in range(requests):
            self._name += 1
            prompt = {"prompt_token_ids": [(7919 * (index + 1)) % (vocab - 1)]}
            self.core.add_request(str(self._name), prompt, sampling)
        first = str(self._name - requests + 1)
        times, ids = [], []
        while self.core.has_unfinished_requests():
            outputs = self.core.step()
            times.append(time.perf_counter())
            ids += [list(o.outputs[0].token_ids) for o in outputs if o.request_id == first and o.finished]
        after = self.model.counters.routes.as_dict()
        gaps = [1e3 * (later - earlier) for earlier, later in pairwise(times)]
        steps = {k: {r: n - before[k].get(r, 0) for r, n in found.items()} for k, found in after.items()}
        return Block(gaps[warm_up : warm_up + tokens], ids[0], steps)

    def turn(self, requests: int, steps: int) -> Turn:
        """So many more steps of the requests that run; where none do, they begin first."""
        from vllm import SamplingParams

        if not self.core.has_unfinished_requests():
            vocab = self.model.config.vocab_size
            sampling = SamplingParams(
                temperature=0, max_tokens=self._length - DRAFTS, ignore_eos=True, detokenize=False
            )
            for index in range(requests):
                self._name += 1
                prompt = {"prompt_token_ids": [(7919 * (index + 1)) % (vocab - 1)]}
                self.core.add_request(str(self._name), prompt, sampling)
            self._tokens = {}
        for _ in range(SETTLING):
            self._step()
        before, started = sum(self._tokens.values()), time.perf_counter()
        for _ in range(steps):
            self._step()
        seconds = time.perf_counter() - started
        tokens = sum(self._tokens.values()) - before
        drafting = self.model.drafting
        return Turn(1e3 * seconds * requests / tokens, [] if drafting is None else list(drafting.lengths.rounds))

    def end(self) -> None:
        """Ends all requests."""
        self.core.abort_request(list(self._tokens))
        while self.core.has_unfinished_requests():
            self.core.step()

    def _step(self) -> None:
        for output in self.core.step():
            self._tokens[output.request_id] = len(output.outputs[0].token_ids)


def memory() -> dict[str, float]:
    """Resident memory of this process by kind, MiB; what the kernel counts, peaks as `VmHWM`."""
    found = {}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem"):
                found[name] = int(value.split()[0]) / 1024
    return found


def _serve(connection: Connection, model: str, arm: Arm, threads: int, length: int, draft: str | None) -> None:
    os.environ.update(environment(arm, threads))
    try:
        engine = Engine(model, arm, threads, length, draft)
        connection.send(None)
        while (order := connection.recv()) is not None:
            name, arguments = order
            connection.send(getattr(engine, name)(**arguments))
    except EOFError:
        pass  # the parent has ended


class EngineProcess:
    """The parent's end. A context manager that ends the process."""

    def __init__(self, model: str, arm: Arm, threads: int, length: int = MAX_LENGTH, draft: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.arm = arm
        self._connection, theirs = context.Pipe()
        # The environment counts from the start of the child: OpenMP reads it when the library is loaded.
        saved = dict(os.environ)
        os.environ.update(environment(arm, threads))
        try:
            self._process = context.Process(target=_serve, args=(theirs, model, arm, threads, length, draft))
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(saved)
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def __enter__(self) -> "EngineProcess":
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._connection.send(None)
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def ask(self, order: str, **arguments: Any) -> Any:
        """Raises RuntimeError if the engine's process has ended."""
        self._connection.send((order, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{self.arm}: the engine ended with {self._process.exitcode}; see above") from None
