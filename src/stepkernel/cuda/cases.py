"""Steps that kernels are built for: small ones that tests execute, and the published models."""

from dataclasses import dataclass, replace

from stepkernel.cuda.plan import Geometry, Plan, codes_of, make_plan, only
from stepkernel.cuda.spec import KernelSpec, kernel_of
from stepkernel.model.config import ModelConfig
from stepkernel.model.presets import preset
from stepkernel.model.shard import Shard
from stepkernel.program.builder import Taps, build_program
from stepkernel.program.inputs import Caches
from stepkernel.program.program import Program
from stepkernel.runtime.caches import LatentDtype, RecurrentDtype, allocate_caches

GRID = 132  # CTAs: one for each multiprocessor of an H200; larger GPUs leave some idle
SMALL_GRID = 8
PAGE_TOKENS = 64
SMALL_PAGE_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """A step of `requests` x `queries` rows of a model, or of one of several ranks, which may share out the latent rows
    `interleave` tokens at a time."""

    name: str
    config: ModelConfig
    requests: int
    queries: int
    grid: int = SMALL_GRID
    page_tokens: int = SMALL_PAGE_TOKENS
    ranks: int = 1
    taps: Taps | None = None
    interleave: int | None = None
    multicast: bool = False
    latents: LatentDtype = "bf16"
    states: RecurrentDtype = "float32"
    recovers: bool = False

    def program(self, rank: int = 0) -> Program:
        shard = Shard(rank, self.ranks)
        return build_program(
            self.config, shard, self.requests, self.queries, taps=self.taps, context_interleave=self.interleave
        )

    def plan(self, rank: int = 0) -> Plan:
        """All ranks have the same codes. Raises ValueError if the kernel cannot do it."""
        window = self.config.linear_attention.conv_width - 2 + self.queries
        geometry = Geometry(
            self.grid,
            self.page_tokens,
            window,
            self.multicast,
            self.latents == "fp8",
            self.states == "bfloat16",
            self.recovers,
        )
        return make_plan(self.program(rank), geometry)

    def spec(self) -> KernelSpec:
        return kernel_of(self.name, self.plan())

    def caches(self, pages: int, slots: int, shard: Shard | None = None) -> Caches:
        """Empty caches of one rank."""
        return allocate_caches(
            self.config,
            pages,
            slots,
            self.page_tokens,
            drafts=self.queries - 1,
            shard=shard,
            latent_dtype=self.latents,
            recovers=self.recovers,
            state_dtype=self.states,
        )


def micro_k3() -> ModelConfig:
    """Two layers with every stage kind of Kimi K3, as small as the stages allow: KDA and dense, then MLA and MoE.

    Widths and counts are such that loops and guards of the kernels matter: one CTA has several pieces of every stage,
    tiles do not fill the last piece, heads and experts are no powers of two.
    """
    config = replace(_micro(preset("tiny-k3")), routed_hidden_size=128, q_lora_rank=64, attn_res_block_size=2)
    return replace(config, num_experts=36, linear_attention=replace(config.linear_attention, num_heads=2))


def micro_linear() -> ModelConfig:
    return replace(_micro(preset("tiny-kimi-linear")), num_heads=9)


def _micro(config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        hidden_size=512,
        num_layers=2,
        vocab_size=1536,
        num_heads=3,
        intermediate_size=704,
        num_experts=6,
        experts_per_token=3,
        moe_intermediate_size=192,
        kv_lora_rank=192,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        max_positions=512,
        bos_token_id=1520,
        eos_token_ids=(1522,),
        pad_token_id=1535,
        linear_attention=replace(config.linear_attention, num_heads=1),
        kda_layers=(0,),
        mla_layers=(1,),
    )


def k3_rank() -> ModelConfig:
    """Two layers with the widths that one of Kimi K3's 16 ranks has, as a model of one rank: heads, MLP widths and
    experts' width divided by 16. Few experts, tokens and layers; what is left of each is as wide as in Kimi K3."""
    k3, ranks = preset("kimi-k3"), 16
    heads = k3.num_heads // ranks
    return replace(
        k3,
        num_layers=2,
        attn_res_block_size=1,
        vocab_size=1536,
        num_heads=heads,
        intermediate_size=k3.intermediate_size // ranks,
        num_experts=24,
        moe_intermediate_size=k3.moe_intermediate_size // ranks,
        max_positions=1024,
        bos_token_id=1520,
        eos_token_ids=(1522,),
        pad_token_id=1535,
        linear_attention=replace(k3.linear_attention, num_heads=heads),
        kda_layers=(0,),
        mla_layers=(1,),
    )


@dataclass(frozen=True)
class StageCase:
    """One stage of a case as a kernel of its own, which also runs the other stages of the same code."""

    name: str
    case: Case
    stage: int

    def plan(self) -> Plan:
        whole = self.case.plan()
        return only(whole, codes_of(whole, self.stage))

    def stages(self) -> set[int]:
        """All stages that the kernel can run."""
        return {stage for stage, (first, last) in enumerate(self.plan().ranges) if last > first}

    def spec(self) -> KernelSpec:
        return kernel_of(self.name, self.plan())


def small() -> tuple[Case, ...]:
    """A verification step and a plain one of three requests, with the streams that a draft reads. In the second one
    CTAs share heads, contexts and logits; in the first one each has its own."""
    return (
        Case("micro_k3_3x2", micro_k3(), 3, 2, grid=5, taps=Taps((1,), "attn_res_stream")),
        Case("micro_linear_3x1", micro_linear(), 3, 1, grid=7, taps=Taps((0,))),
    )


def variants() -> tuple[Case, ...]:
    """Other ways to keep what lies in the caches: FP8 latents, states that are recovered from records, BF16 states.
    First one CTA for each head and context, then several."""
    k3, linear = micro_k3(), micro_linear()
    return (
        Case("micro_k3_3x2_fp8_recovering", k3, 3, 2, grid=5, latents="fp8", recovers=True),
        Case("micro_linear_2x4_fp8_recovering_bf16", linear, 2, 4, latents="fp8", recovers=True, states="bfloat16"),
        Case("micro_linear_3x1_fp8_bf16", linear, 3, 1, grid=7, latents="fp8", states="bfloat16"),
    )


# Stages of the small cases that differ in what their code does, by the end of their names.
_STAGES = (
    (
        "embed",
        "final.mix",
        "kda.low",
        "kda.core",
        "dense.activate",
        "mla.input",
        "mla.insert",
        "mla.absorb",
        "mla.attend",
        "mla.value",
        "moe.select",
        "moe.up",
        "moe.down",
        "moe.combine",
        "argmax",
    ),
    (
        "L01.attention.mix",
        "kda.core",
        "dense.activate",
        "mla.insert",
        "mla.attend",
        "mla.value",
        "moe.front",
        "moe.up",
        "moe.down",
        "moe.combine",
        "argmax",
    ),
)


def stages() -> tuple[StageCase, ...]:
    """Every stage kind, and every variant of it that the two models have, as small kernels."""
    found = []
    for case, wanted in zip(small(), _STAGES, strict=True):
        found += [_stage(case, case.name.split("_")[1], suffix) for suffix in wanted]
    k3, _, linear = variants()
    found += [_stage(k3, "fp8", suffix) for suffix in ("mla.insert", "mla.attend")]
    return (*found, _stage(k3, "recovering", "kda.core"), _stage(linear, "bf16", "kda.core"))


def _stage(case: Case, prefix: str, suffix: str) -> StageCase:
    """The first stage of a case whose name ends so."""
    names = [stage.name for stage in case.plan().program.stages]
    index = next(k for k, name in enumerate(names) if name.endswith(suffix))
    return StageCase(f"{prefix}_{suffix.replace('.', '_')}", case, index)


def tiny() -> tuple[Case, ...]:
    """What the longer tests execute: the tiny models with 1 row, 8 rows, and 2 requests of 4 queries."""
    shapes = ((1, 1), (8, 1), (2, 4))
    return tuple(
        Case(f"{name.replace('-', '_')}_{requests}x{queries}", preset(name), requests, queries)
        for name in ("tiny-k3", "tiny-kimi-linear")
        for requests, queries in shapes
    )


def many() -> tuple[Case, ...]:
    """Steps of more rows than one mma takes: two eights with room left, three, and the most that a kernel can do. As
    there are few experts, some are chosen by more rows than a pass takes."""
    return (
        Case("micro_k3_3x4", micro_k3(), 3, 4, grid=5),
        Case("micro_linear_19x1", micro_linear(), 19, 1, grid=7),
        Case("micro_linear_64x1", micro_linear(), 64, 1, grid=7),
    )


def wide() -> Case:
    """Every stage kind at the tile shapes of Kimi K3 over 16 ranks, by few CTAs."""
    return Case("k3_rank_2x4", k3_rank(), 2, 4, taps=Taps((0,), "attn_res_stream"))


def wide_stages() -> tuple[StageCase, ...]:
    """Stages whose pieces depend on the CTAs of a GPU, or on the number of experts: planned as for Kimi K3."""
    case = Case("k3_rank_1x8", replace(k3_rank(), num_experts=preset("kimi-k3").num_experts), 1, 8, GRID)
    return tuple(_stage(case, "rank", suffix) for suffix in ("kda.core", "mla.attend", "moe.select"))


def published() -> tuple[Case, ...]:
    """Kimi-Linear-48B on one GPU, and one of Kimi K3's 16 ranks: 1, 2, 4 and 8 requests, and 8 tokens of one."""
    models = (("kimi_linear_48b", "kimi-linear-48b-a3b", 1), ("kimi_k3_tp16", "kimi-k3", 16))
    return tuple(
        Case(f"{name}_{requests}x{queries}", preset(model), requests, queries, GRID, PAGE_TOKENS, ranks)
        for name, model, ranks in models
        for requests, queries in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 8))
    )
