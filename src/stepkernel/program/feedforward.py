"""Stages of the dense MLP (spec 2.7) and of the latent or plain MoE with its shared experts (spec 2.8)."""

from stepkernel.model.config import ModelConfig
from stepkernel.model.shard import Shard, ShardSizes
from stepkernel.program.stages import (
    Activate,
    Buffer,
    Combine,
    Exchange,
    ExpertsDown,
    ExpertsUp,
    Linear,
    Matrix,
    Projection,
    Select,
    Stage,
)


def stages(config: ModelConfig, sizes: ShardSizes, shard: Shard, layer: int) -> tuple[list[Stage], tuple[str, ...]]:
    """The stages of the layer's MLP, and the buffers whose sum is its output."""
    if config.is_moe(layer):
        return _moe(config, sizes, shard, layer)
    return _dense(config, sizes, layer, "all_reduce" if shard.size > 1 else "none")


def buffers(config: ModelConfig, sizes: ShardSizes) -> list[Buffer]:
    found: list[Buffer] = []
    if any(not config.is_moe(layer) for layer in range(config.num_layers)):
        found += [
            Buffer("dense_gate_up", 2 * sizes.dense_intermediate, "bf16"),
            Buffer("dense_act", sizes.dense_intermediate, "bf16"),
            Buffer("dense_out", config.hidden_size, "bf16"),
        ]
    if any(config.is_moe(layer) for layer in range(config.num_layers)):
        top_k, expert_in = config.experts_per_token, config.expert_input_size
        latent = config.routed_hidden_size
        found += [
            Buffer("router_logits", config.num_experts, "f32"),
            Buffer("latent", latent or 0, "bf16"),
            Buffer("shared_gate_up", 2 * sizes.shared_intermediate, "bf16"),
            Buffer("shared_act", sizes.shared_intermediate, "bf16"),
            Buffer("shared_out", config.hidden_size if sizes.shared_intermediate else 0, "bf16"),
            Buffer("expert_ids", top_k, "i32"),
            Buffer("expert_weights", top_k, "f32"),
            Buffer("slot_hidden", top_k * sizes.expert_intermediate, "bf16"),
            Buffer("slot_out", top_k * expert_in, "bf16"),
            Buffer("routed", expert_in, "bf16"),
            Buffer("routed_out", config.hidden_size if latent else 0, "bf16"),
        ]
    return found


def _dense(config: ModelConfig, sizes: ShardSizes, layer: int, reduce: Exchange) -> tuple[list[Stage], tuple[str, ...]]:
    hidden, width = config.hidden_size, sizes.dense_intermediate
    prefix, name = f"model.layers.{layer}.mlp.", f"L{layer:02d}.dense."
    gate_up = tuple(
        Projection(Matrix(f"{prefix}{x}_proj.weight", width, hidden), "hidden", "dense_gate_up", i * width)
        for i, x in enumerate(("gate", "up"))
    )
    down = Projection(Matrix(f"{prefix}down_proj.weight", hidden, width), "dense_act", "dense_out", 0, reduce)
    return [
        Linear(name + "gate_up", layer, gate_up),
        Activate(name + "activate", layer, "dense_gate_up", width, "dense_act"),
        Linear(name + "down", layer, (down,)),
    ], ("dense_out",)


def _moe(config: ModelConfig, sizes: ShardSizes, shard: Shard, layer: int) -> tuple[list[Stage], tuple[str, ...]]:
    hidden, latent, top_k = config.hidden_size, config.routed_hidden_size, config.experts_per_token
    experts, wide = config.num_experts, sizes.expert_intermediate
    expert_in = config.expert_input_size
    shared = sizes.shared_intermediate
    reduce: Exchange = "all_reduce" if shard.size > 1 else "none"
    gather: Exchange = "all_gather" if shard.size > 1 else "none"
    prefix, name = f"model.layers.{layer}.block_sparse_moe.", f"L{layer:02d}.moe."

    def part(
        tensor: str, rows: int, columns: int, x: str, out: str, offset: int = 0, exchange: Exchange = "none"
    ) -> Projection:
        return Projection(Matrix(f"{prefix}{tensor}.weight", rows, columns), x, out, offset, exchange)

    def expert(which: str, rows: int, columns: int) -> Matrix:
        suffix = ".weight" if config.expert_format == "bf16" else ""
        return Matrix(f"{prefix}experts.{{}}.{which}{suffix}", rows, columns, config.expert_format)

    router = sizes.router_rows
    front = [part("gate", router, hidden, "hidden", "router_logits", shard.rank * router, gather)]
    if latent is not None:
        down = sizes.latent_down_rows
        front.append(part("routed_expert_down_proj", down, hidden, "hidden", "latent", shard.rank * down, gather))
    if shared:
        front += [
            part(f"shared_experts.{x}_proj", shared, hidden, "hidden", "shared_gate_up", i * shared)
            for i, x in enumerate(("gate", "up"))
        ]
    tail: list[Projection] = []
    delta: list[str] = []
    if latent is not None:
        up = sizes.latent_up_rows
        tail.append(part("routed_expert_up_proj", up, latent, "routed", "routed_out", shard.rank * up, gather))
        delta.append("routed_out")
    else:
        delta.append("routed")
    if shared:
        tail.append(part("shared_experts.down_proj", hidden, shared, "shared_act", "shared_out", 0, reduce))
        delta.append("shared_out")
    x = "hidden" if latent is None else "latent"
    norm = f"{prefix}routed_expert_norm.weight" if latent is not None and config.latent_moe_use_norm else None
    found: list[Stage] = [
        Linear(name + "front", layer, tuple(front)),
        Select(
            name + "select",
            layer,
            experts,
            top_k,
            f"{prefix}gate.e_score_correction_bias",
            config.renormalize,
            config.routed_scaling_factor,
            "router_logits",
            "expert_ids",
            "expert_weights",
        ),
    ]
    if shared:
        found.append(Activate(name + "shared", layer, "shared_gate_up", shared, "shared_act"))
    w1, w3 = expert("w1", wide, expert_in), expert("w3", wide, expert_in)
    found += [
        ExpertsUp(name + "up", layer, experts, top_k, w1, w3, x, "expert_ids", "slot_hidden"),
        ExpertsDown(
            name + "down",
            layer,
            experts,
            top_k,
            expert("w2", expert_in, wide),
            "slot_hidden",
            "expert_ids",
            "slot_out",
        ),
        Combine(
            name + "combine",
            layer,
            top_k,
            expert_in,
            norm,
            config.rms_norm_eps,
            "slot_out",
            "expert_weights",
            "routed",
            reduce,
        ),
    ]
    if tail:
        found.append(Linear(name + "tail", layer, tuple(tail)))
    return found, tuple(delta)
