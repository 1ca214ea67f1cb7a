"""What a user sets through vLLM's `--additional-config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

DecodeBackend = Literal["auto", "latency_specialized"]
DECODE_BACKENDS: tuple[DecodeBackend, ...] = get_args(DecodeBackend)
SCHEDULER = "stepkernel.vllm_plugin.scheduler.StepScheduler"
PROPOSER = "stepkernel.vllm_plugin.proposer.DsparkProposer"
FP8_CACHE = ("fp8", "fp8_e4m3")  # vLLM's names for E4M3 latent rows, --kv-cache-dtype


class DeploymentError(ValueError):
    """A deployment that cannot run: what was found, what is supported and what to change, in one line."""


@dataclass(frozen=True)
class Options:
    """decode_backend   "auto": every step on the standard path; "latency_specialized": decode steps as one native call.
    decode_threads   threads of a native step at most; None: the processors this process may use.
    activation_bits  15 or 8: integers that activations of MXFP4 experts are turned into.
    rank_timeout     seconds that tensor-parallel ranks wait for each other inside a step before all of them stop.
    draft            directory of a DSpark draft made for the model; None: no drafts of ours.
    fixed_drafts     num_speculative_tokens drafts in every round; otherwise fewer where that is faster.
    batch_invariant  prompts too are computed by native steps, one token at a time: no bit of what a request gets
                     depends on what else runs. Only with latency_specialized.
    kernels          on a GPU: the directory that `stepkernel kernels build` wrote.
    """

    decode_backend: DecodeBackend = "auto"
    decode_threads: int | None = None
    activation_bits: int = 15
    rank_timeout: float = 10.0
    draft: str | None = None
    fixed_drafts: bool = False
    batch_invariant: bool = False
    kernels: str | None = None

    @property
    def specialises(self) -> bool:
        return self.decode_backend == "latency_specialized"

    @staticmethod
    def parse(additional: Mapping[str, Any] | None) -> "Options":
        """Reads our keys; others belong to other plugins. Raises DeploymentError."""
        given = additional or {}
        backend = given.get("decode_backend", "auto")
        if backend not in DECODE_BACKENDS:
            raise DeploymentError(
                f"additional_config decode_backend {backend!r}: supported are {' and '.join(DECODE_BACKENDS)}"
            )
        threads = given.get("decode_threads")
        if threads is not None and (
            isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 64
        ):
            raise DeploymentError(
                f"additional_config decode_threads {threads!r}: supported are 1 to 64, or leave it out"
            )
        bits = given.get("activation_bits", 15)
        if bits not in (8, 15) or isinstance(bits, bool):
            raise DeploymentError(f"additional_config activation_bits {bits!r}: supported are 15 and 8")
        timeout = given.get("rank_timeout", 10.0)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0.1 <= timeout <= 600:
            raise DeploymentError(f"additional_config rank_timeout {timeout!r}: supported are 0.1 to 600 seconds")
        draft = given.get("draft")
        if draft is not None and (not isinstance(draft, str) or not draft):
            raise DeploymentError(f"additional_config draft {draft!r}: expected the directory of a DSpark draft")
        fixed = given.get("fixed_drafts", False)
        if not isinstance(fixed, bool):
            raise DeploymentError(f"additional_config fixed_drafts {fixed!r}: supported are true and false")
        invariant = given.get("batch_invariant", False)
        if not isinstance(invariant, bool):
            raise DeploymentError(f"additional_config batch_invariant {invariant!r}: supported are true and false")
        if invariant and backend != "latency_specialized":
            raise DeploymentError(
                f"additional_config batch_invariant with decode_backend {backend!r}: the standard path groups its "
                "products by the rows of a step; set decode_backend to latency_specialized"
            )
        kernels = given.get("kernels")
        if kernels is not None and (not isinstance(kernels, str) or not kernels):
            raise DeploymentError(f"additional_config kernels {kernels!r}: expected a directory of built GPU kernels")
        return Options(backend, threads, bits, float(timeout), draft, fixed, invariant, kernels)


def speculation(directory: str, drafts: int, fixed: bool = False) -> dict[str, Any]:
    """Arguments of `LLM(...)` that serve a model with the DSpark draft of a directory."""
    fixing = {"fixed_drafts": True} if fixed else {}
    return {
        "additional_config": {"decode_backend": "latency_specialized", "draft": directory, **fixing},
        "speculative_config": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": drafts},
    }
