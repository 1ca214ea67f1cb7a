"""The model class that vLLM instantiates for the Kimi K3 family."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.platforms import current_platform

from stepkernel.cpu.failure import GroupError
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.config import ModelConfig
from stepkernel.model.weights import Weights
from stepkernel.program.builder import build_program
from stepkernel.program.context import context_shard
from stepkernel.program.program import MAX_ROWS
from stepkernel.program.routing import Reason, route
from stepkernel.runtime.drafting import Draft
from stepkernel.vllm_plugin.batch import step_facts
from stepkernel.vllm_plugin.compatibility import tame_llvmlite
from stepkernel.vllm_plugin.counters import StepCounters
from stepkernel.vllm_plugin.layers import Dtypes, KdaLayer, MlaLayer, Shapes, state_shapes
from stepkernel.vllm_plugin.options import Options
from stepkernel.vllm_plugin.ranks import Ranks
from stepkernel.vllm_plugin.standard.compiled import CompiledPath, compiles
from stepkernel.vllm_plugin.standard.opaque import TABLE, Cores
from stepkernel.vllm_plugin.standard.path import StandardPath
from stepkernel.vllm_plugin.standard.weights import PlainWeights, StandardWeights

if TYPE_CHECKING:
    from stepkernel.vllm_plugin.decode import DecodeOutputs, SpecialisedDecode
    from stepkernel.vllm_plugin.drafting import Drafting


class KimiForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """Text part of Kimi K3, and Kimi Linear."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config
        self.options = Options.parse(vllm_config.additional_config)
        self.dtype = vllm_config.model_config.dtype
        self.checkpoint = Checkpoint.open(model_directory(vllm_config))
        self.config = self.checkpoint.config
        name = f"{prefix}.layers" if prefix else "model.layers"
        self.kda_layers = {i: KdaLayer(self.config, vllm_config, f"{name}.{i}.kda") for i in self.config.kda_layers}
        self.mla_layers = {i: MlaLayer(self.config, vllm_config, f"{name}.{i}.mla") for i in self.config.mla_layers}
        self.draft = open_draft(self.options, self.config, vllm_config.num_speculative_tokens)
        self.draft_layers: dict[int, MlaLayer] = {}
        if self.draft is not None:
            # Numbered behind the model's own, since vLLM wants one number in each name.
            backbone = self.draft.backbone
            self.draft_layers = {
                i: MlaLayer(backbone, vllm_config, f"{name}.{self.config.num_layers + i}.draft")
                for i in backbone.mla_layers
            }
        self.ranks = Ranks(self.options.rank_timeout, self.options.specialises)
        self.program = build_program(
            self.config, self.ranks.shard, taps=None if self.draft is None else self.draft.taps
        )
        parallel = vllm_config.parallel_config
        shared = parallel.decode_context_parallel_size > 1
        self.interleave = parallel.cp_kv_cache_interleave_size if shared else None
        self.counters = StepCounters(exported=self.ranks.shard.rank == 0)
        self.on_gpu = current_platform.is_cuda()
        # Where every step is a native one, prompts go one token at a time; there is no standard path on a GPU.
        self.invariant = self.options.batch_invariant or self.on_gpu
        self.standard: StandardPath | None = None
        self.decode: SpecialisedDecode | None = None
        self.drafting: Drafting | None = None
        self._ready: DecodeOutputs | None = None
        self._given: DecodeOutputs | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Reads the checkpoint itself, memory-mapped and checked; vLLM's iterator is left alone."""
        source = self.checkpoint.weights(self.ranks.shard)
        if self.on_gpu:
            self._prepare_gpu(source)
            return
        # With batch invariance the standard path only runs while vLLM sizes its cache.
        graph = compiles(self.vllm_config) and not self.options.batch_invariant
        chosen: StandardWeights = (
            self._prepare_decode(source)
            if self.options.specialises
            else PlainWeights(self.program, source, self.dtype, fused=graph)
        )
        parts: dict[str, Any] = {
            "program": self.program,
            "weights": chosen,
            "dtype": self.dtype,
            "kda_layers": self.kda_layers,
            "mla_layers": self.mla_layers,
            "exchange": self.ranks.exchange,
            "context": context_shard(self.ranks.shard, self.interleave),
        }
        if not graph:
            self.standard = StandardPath(**parts)
            return
        cores = Cores()
        self.vllm_config.compilation_config.static_forward_context[TABLE] = cores
        with set_current_vllm_config(self.vllm_config):
            self.standard = CompiledPath(**parts, cores=cores)

    def _prepare_gpu(self, source: Weights) -> None:
        """Everything by the GPU step kernel; weights go to the GPU when vLLM has bound its caches."""
        # Imported late: it is of use on a GPU alone.
        from stepkernel.cuda.gpu import Gpu
        from stepkernel.vllm_plugin.decode import SpecialisedDecode
        from stepkernel.vllm_plugin.gpu_deployment import prepared
        from stepkernel.vllm_plugin.gpu_executors import GpuExecutors

        kernels = Path(self.options.kernels or "")
        gpu = Gpu(torch.cuda.current_device())
        requests = prepared(kernels, gpu, self.config, self.vllm_config.scheduler_config.max_num_seqs)
        self.decode = SpecialisedDecode(
            self.config,
            GpuExecutors(gpu, kernels, source, torch.cuda.synchronize),
            self.kda_layers,
            self.mla_layers,
            self.dtype,
            requests,
            self.ranks.shard,
        )

    def _prepare_decode(self, source: Weights) -> StandardWeights:
        """Packs the weights once, compiles the kernels, and lets the standard path read what was packed."""
        # Imported late: it brings a compiler along, which the standard path alone does not need.
        from stepkernel.cpu import interpreter
        from stepkernel.cpu.weights import pack_weights
        from stepkernel.vllm_plugin.cpu_executors import CpuExecutors, activations
        from stepkernel.vllm_plugin.decode import SpecialisedDecode
        from stepkernel.vllm_plugin.standard.packed import PackedWeights

        tame_llvmlite()  # for the next engine of this process
        packed = pack_weights(self.program, source, self.options.activation_bits)
        interpreter.enter.prepare_apart()  # not in the first step
        drafts, most = self.vllm_config.num_speculative_tokens, self.vllm_config.scheduler_config.max_num_seqs
        requests = min(most, MAX_ROWS // (1 + drafts))
        rounding = activations(self.dtype)
        executors = CpuExecutors(packed, rounding, self.ranks, self.options.decode_threads)
        self.decode = SpecialisedDecode(
            self.config,
            executors,
            self.kda_layers,
            self.mla_layers,
            self.dtype,
            requests,
            self.ranks.shard,
            drafts,
            None if self.draft is None else self.draft.taps,
            self.interleave,
        )
        if self.draft is not None and self.ranks.shard.rank == 0:
            from stepkernel.cpu.crew import Crew
            from stepkernel.vllm_plugin.drafting import Drafting, whole_ends

            alone = self.ranks.shard.size == 1
            whole = source if alone else self.checkpoint.weights()
            self.drafting = Drafting(
                self.draft,
                whole,
                packed if alone else whole_ends(self.config, whole, self.options.activation_bits),
                self.draft_layers,
                drafts,
                requests,
                self.vllm_config.model_config.max_model_len,
                rounding,
                executors.crew if alone else Crew(self.options.decode_threads),
                not self.options.fixed_drafts,
            )
        return PackedWeights(self.program, packed, source, self.dtype)

    def rehearse_drafts(self) -> None:
        """Learns what rounds with drafts take, before the first request; called on all ranks once vLLM has bound its
        caches."""
        if self.draft is None or self.decode is None or self.options.fixed_drafts:
            return
        extra = self.decode.rehearse({} if self.drafting is None else self.drafting.drafters)
        if self.drafting is not None:
            self.drafting.lengths.extra = extra

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError("prompt embeddings are not supported")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Normalised hidden rows; without rotation, positions are only in the lengths.

        The one decision about the path of a step is made here, from what all ranks know.
        """
        self._ready = self._given = None
        pages = next(iter(self.mla_layers.values())).batch() if self.mla_layers else None
        states = next(iter(self.kda_layers.values())).batch() if self.kda_layers else None
        if pages is None:
            return self._profiled(input_ids)
        decode = self.decode
        prepared = (0, range(1, 2)) if decode is None else (decode.max_requests, decode.queries)
        taken = route(step_facts(pages, states, *prepared, batch_invariant=self.invariant))
        started = time.perf_counter()
        try:
            if taken.kind == "specialized" and decode is not None:
                by_tokens = taken.reason is Reason.INVARIANT
                outputs = (decode.run_by_tokens if by_tokens else decode.run)(input_ids, pages)
                hidden, self._ready = outputs.hidden, outputs
                taps = outputs.taps
            else:
                assert self.standard is not None
                self.ranks.same_step(input_ids, pages)
                hidden, *kept = self.standard(input_ids)
                taps = kept[0].float().numpy() if kept else None
        except GroupError:
            self.ranks.end()
            raise
        self.counters.count(taken, time.perf_counter() - started, pages.rows)
        if self.drafting is not None and taps is not None and states is not None:
            self.drafting.see(taps, states)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """float32 [rows, vocab]; a specialised step has those that are asked for first already, in order."""
        ready, self._ready = self._ready, None
        if ready is not None and len(ready.logits) == len(hidden_states):
            self._given = ready
            return ready.logits
        if self.invariant and self.decode is not None and self.decode.bound:
            return self.decode.logits(hidden_states)
        if self.standard is None:
            return hidden_states.new_zeros(len(hidden_states), self.config.vocab_size, dtype=torch.float32)
        return self.standard.logits(hidden_states)

    def _profiled(self, input_ids: Tensor) -> Tensor:
        """vLLM's runs without caches, whose results nobody looks at."""
        if self.standard is None:
            return torch.zeros(len(input_ids), self.config.hidden_size, dtype=self.dtype, device=input_ids.device)
        return self.standard(input_ids)[0]

    def chosen(self, logits: Tensor) -> Tensor | None:
        """int32 [rows]: the largest of these logits, if the last step has found it; None where a row holds a NaN."""
        given = self._given
        if given is None or given.logits is not logits or bool((given.tokens < 0).any()):
            return None
        return given.tokens

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Dtypes:
        return vllm_config.model_config.dtype, torch.float32

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Shapes:
        config = ModelConfig.from_file(model_directory(vllm_config))
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return state_shapes(config, ranks, vllm_config.num_speculative_tokens)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return MambaStateCopyFuncCalculator.kda_state_copy_func()


def open_draft(options: Options, target: ModelConfig, drafts: int) -> Draft | None:
    """The draft that the options name, checked against its target; ConfigError or CheckpointError."""
    return None if options.draft is None else Draft.open(options.draft, target, drafts)


def model_directory(vllm_config: VllmConfig) -> Path:
    """The model's files here: its directory, or what the hub's cache holds of a repository."""
    model = vllm_config.model_config
    directory = Path(model.model)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors"]
    return Path(snapshot_download(model.model, revision=model.revision, allow_patterns=patterns))
