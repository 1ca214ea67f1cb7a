"""Other tools' result files as records: their names mapped to ours, and refused where a name means something else."""

from collections.abc import Callable

from stepkernel.measure.importers.aiperf import from_aiperf
from stepkernel.measure.importers.common import Given, Imported
from stepkernel.measure.importers.guidellm import from_guidellm
from stepkernel.measure.importers.inferencex import from_inferencex
from stepkernel.measure.importers.vllm_bench import from_vllm_bench

IMPORTERS: dict[str, Callable[[str, str, Given], list[Imported]]] = {
    "vllm-bench": from_vllm_bench,
    "aiperf": from_aiperf,
    "guidellm": from_guidellm,
    "inferencex": from_inferencex,
}
