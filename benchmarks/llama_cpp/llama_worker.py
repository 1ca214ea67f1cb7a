"""llama.cpp as a worker, through llama-cpp-python's low-level batch interface; runs in the environment that has it."""

import argparse
import ctypes
import gc
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from .worker import serve
from .workload import Workload

F32, F16 = 0, 1  # GGML types of the latent cache
PAD = 256  # llama.cpp rounds the length of a cache up to this


@dataclass(frozen=True)
class Options:
    """How llama.cpp runs.

    exact            float32 latent cache and plain attention; flash attention rounds
    mmap             the file is mapped instead of read
    unified          one cache for all sequences
    plain_attention  no flash attention
    """

    threads: int
    exact: bool
    mmap: bool
    unified: bool
    plain_attention: bool


class Llama:
    """A loaded model, and a context of the size that the workload at hand needs."""

    def __init__(self, file: str, options: Options) -> None:
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if options.mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
        model = llama_cpp.llama_model_load_from_file(file.encode(), parameters)
        if model is None:
            raise ValueError(f"llama.cpp cannot load {file}")
        self._model, self._options = model, options
        self._context: Any = None
        self._batch: Any = None
        self._workload = Workload(1, 1, 0, 0)
        self._tokens = self._workload.tokens()

    def facts(self) -> dict[str, Any]:
        return {
            "versions": {"llama-cpp-python": version("llama-cpp-python"), "numpy": version("numpy")},
            "system_info": llama_cpp.llama_print_system_info().decode(),
            "options": {**asdict(self._options), "extra_buffer_types": True},
            "timed": "llama_decode and llama_synchronize: the graph and the copy of the logits, no argmax",
        }

    def prepare(self, workload: Workload) -> dict[str, Any]:
        if self._context is not None:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self._context)
        requests = workload.requests
        self._workload = workload
        self._tokens = workload.tokens()
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_seq_max = requests
        parameters.n_ctx = requests * -(-len(self._tokens) // PAD) * PAD
        parameters.n_batch = parameters.n_ubatch = max(requests, 32)
        options = self._options
        parameters.n_threads = parameters.n_threads_batch = options.threads
        parameters.type_k = parameters.type_v = F32 if options.exact else F16
        parameters.kv_unified = options.unified
        if options.exact or options.plain_attention:
            parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if self._context is None:
            raise ValueError("llama.cpp cannot make a context")
        self._batch = llama_cpp.llama_batch_init(requests, 0, 1)
        self._batch.n_tokens = requests
        for row in range(requests):
            self._batch.n_seq_id[row] = 1
            self._batch.seq_id[row][0] = row
            self._batch.logits[row] = 1
        return {}

    def block(self, warm_up: int) -> list[float]:
        self._restart()
        times = []
        gc.disable()
        for position in range(len(self._tokens)):
            self._fill(position)
            start = time.perf_counter_ns()
            status = llama_cpp.llama_decode(self._context, self._batch)
            llama_cpp.llama_synchronize(self._context)
            times.append((time.perf_counter_ns() - start) / 1e6)
            self._check(status)
        gc.enable()
        return times[self._workload.context + warm_up :]

    def logits(self) -> NDArray[np.float32]:
        self._restart()
        requests, vocab = self._workload.requests, self._workload.vocab
        found = np.empty((len(self._tokens), requests, vocab), np.float32)
        for position in range(len(self._tokens)):
            self._fill(position)
            self._check(llama_cpp.llama_decode(self._context, self._batch))
            for row in range(requests):
                values = llama_cpp.llama_get_logits_ith(self._context, row)
                pointer = ctypes.cast(values, ctypes.POINTER(ctypes.c_float))
                found[position, row] = np.ctypeslib.as_array(pointer, (vocab,))
        return found

    def _restart(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def _fill(self, position: int) -> None:
        for row, token in enumerate(self._tokens[position].tolist()):
            self._batch.token[row] = token
            self._batch.pos[row] = position

    def _check(self, status: int) -> None:
        if status != 0:
            raise ValueError(f"llama_decode returned {status}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, required=True)
    for flag in ("exact", "mmap", "unified", "plain-attention"):
        parser.add_argument(f"--{flag}", action="store_true")
    arguments = vars(parser.parse_args())
    serve(Llama(arguments.pop("file"), Options(**arguments)))


if __name__ == "__main__":
    main()
