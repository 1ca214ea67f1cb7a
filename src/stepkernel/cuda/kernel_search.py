"""Which of the built kernels does the steps of a model: found by their stages, whatever they are called."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepkernel.cuda.cases import GRID, PAGE_TOKENS
from stepkernel.cuda.device_protocol import Target
from stepkernel.cuda.manifest import matches, read
from stepkernel.cuda.plan import Geometry, Plan, make_plan
from stepkernel.cuda.spec import KernelSpec, source_hash
from stepkernel.model.config import ModelConfig
from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.program.program import MAX_ROWS

PROMPT_TOKENS = 8  # of a step that takes a prompt in: as many rows as one matrix instruction has columns
SHOWN = 12


@dataclass(frozen=True, order=True)
class Shape:
    """requests x queries rows of a step, pages of so many tokens, so many CTAs."""

    requests: int
    queries: int
    page_tokens: int
    grid: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.queries} with pages of {self.page_tokens}"


@dataclass(frozen=True)
class Formats:
    """How a session keeps what lies in its caches: FP8 latent rows, recurrent states in BF16."""

    fp8_latents: bool = False
    bf16_states: bool = False

    @property
    def options(self) -> str:
        """Of `stepkernel kernels build`."""
        latents = " --kv-cache-dtype fp8" if self.fp8_latents else ""
        return latents + (" --recurrent-dtype bfloat16" if self.bf16_states else "")

    def __str__(self) -> str:
        latents = ", FP8 latents" if self.fp8_latents else ""
        return latents + (", BF16 states" if self.bf16_states else "")


@dataclass(frozen=True)
class Built:
    """A kernel of a directory that does the steps of a plan."""

    shape: Shape
    plan: Plan
    spec: KernelSpec


class KernelDirectory:
    """What `stepkernel kernels build` wrote, for one GPU and one model.

    Raises ValueError for what is no such directory, or was made by another version or for another architecture.
    """

    def __init__(
        self,
        directory: Path,
        machine: Target,
        config: ModelConfig,
        shard: Shard = Shard(),  # noqa: B008
        formats: Formats = Formats(),
    ) -> None:
        self.directory, self._machine, self._config, self._shard = directory, machine, config, shard
        self._formats = formats
        manifest = read(directory)
        if manifest["source_hash"] != source_hash():
            raise ValueError(
                f"{directory / 'manifest.json'}: kernels of other sources ({manifest['source_hash']}, this version has "
                f"{source_hash()}); build them again"
            )
        arches = sorted({row["arch"] for row in manifest["kernels"]})
        self._rows = [row for row in manifest["kernels"] if row["arch"] == machine.arch]
        if not self._rows:
            raise ValueError(
                f"kernels {directory}: made for {', '.join(arches) or 'nothing'}, {machine.name} takes {machine.arch}; "
                f"run {self._command(1, 1)}"
            )

    def built(self, page_tokens: int | None = None) -> list[Built]:
        """All steps of this model, smallest first, of those that run on the machine."""
        found: dict[Shape, Built] = {}
        for shape, rows in self._shapes().items():
            if page_tokens not in (None, shape.page_tokens) or shape.grid > self._machine.fits:
                continue
            try:
                plan = self._plan(shape)
            except ValueError:
                continue  # kernels of another model, whose stages this one's do not fit
            for row in rows:
                if matches(row, plan.codes, shape.grid):
                    found[shape] = Built(shape, plan, KernelSpec(row["name"], plan.codes, shape.grid))
        return [found[shape] for shape in sorted(found)]

    def refusal(self, requests: int, page_tokens: int | None) -> ValueError:
        """Why there is no kernel that decodes up to so many requests: what there is, and how to make it.

        Raises ValueError if no kernel can do the model's steps.
        """
        self._plan(Shape(min(requests, MAX_ROWS), 1, page_tokens or PAGE_TOKENS, GRID))
        mine = self.built()
        pages = "" if page_tokens is None else f" with pages of {page_tokens} tokens"
        if mine:
            found = "its steps (requests x queries) are " + "; ".join(str(b.shape) for b in mine[:SHOWN])
        else:
            names = [row["name"] for row in self._rows]
            found = f"none of its {len(names)} kernels is of this model: {', '.join(names[:SHOWN])}"
            found += ", ..." if len(names) > SHOWN else ""
        return ValueError(
            f"kernels {self.directory}: no step for up to {requests} requests{pages}{self._formats} on "
            f"{self._machine.arch}; {found}; run {self._command(requests, page_tokens)}"
        )

    def _command(self, requests: int, page_tokens: int | None) -> str:
        pages = "" if page_tokens is None else f" --page-tokens {page_tokens}"
        return (
            f"`stepkernel kernels build --model MODEL --shapes {requests}x1,1x{PROMPT_TOKENS}{pages}"
            f"{self._formats.options} "
            f"--arch {self._machine.arch} --out {self.directory}`"
        )

    def _shapes(self) -> dict[Shape, list[dict[str, Any]]]:
        found: dict[Shape, list[dict[str, Any]]] = {}
        for row in self._rows:
            for shape in _shape(row):
                found.setdefault(shape, []).append(row)
        return found

    def _plan(self, shape: Shape) -> Plan:
        window = self._config.linear_attention.conv_width - 1  # one state slot for each request
        program = build_program(self._config, self._shard, shape.requests, shape.queries)
        formats = self._formats
        geometry = Geometry(
            shape.grid,
            shape.page_tokens,
            window,
            fp8_latents=formats.fp8_latents,
            bf16_states=formats.bf16_states,
        )
        return make_plan(program, geometry)


def _shape(row: dict[str, Any]) -> Iterator[Shape]:
    """Of a whole step; nothing for a kernel of other stages."""
    attends = [code for code in row["codes"] if code["kind"] == "attend"]
    if attends and {"kda", "argmax"} <= {code["kind"] for code in row["codes"]}:
        yield Shape(attends[0]["requests"], attends[0]["queries"], attends[0]["page_tokens"], row["grid"])
