"""What the commands share about drafts: their options, and what they say about a run with them."""

from pathlib import Path
from typing import Any

from stepkernel.cli.common import assets

NOTE = "synthetic acceptance: drafts were accepted by rate, so this is not the model's text and no natural speed"


def draft_directory(draft: str) -> Path:
    """Directory of a draft: a path, or tiny-k3-dspark of the repository by name."""
    path = Path(draft)
    if path.is_dir() or draft != "tiny-k3-dspark":
        return path
    return assets() / draft


def speculation_of(
    draft: str | None,
    tokens: int | None,
    block_verification: bool,
    synthetic: float | None,
    fixed: bool,
    recurrent_states: str = "per-position",
) -> tuple[Path | None, Any]:
    """The draft's directory and SpeculationOptions of the command's options; (None, None) without a draft."""
    from stepkernel.model.draft_config import MAX_DRAFTS, DraftConfig
    from stepkernel.runtime.speculation import SpeculationOptions

    if draft is None:
        for option, given in (
            ("--num-speculative-tokens", tokens is not None),
            ("--block-verification", block_verification),
            ("--synthetic-acceptance-length", synthetic is not None),
            ("--fixed-drafts", fixed),
            ("--recurrent-states recovering", recurrent_states != "per-position"),
        ):
            if given:
                raise ValueError(f"{option} has no effect without --draft; add the draft's directory or drop it")
        return None, None
    if block_verification and synthetic is not None:
        raise ValueError("--block-verification and --synthetic-acceptance-length exclude each other; drop one of them")
    directory = draft_directory(draft)
    config = DraftConfig.from_file(directory)
    most = min(config.max_drafts, MAX_DRAFTS) if tokens is None else tokens
    config.check_drafts(most)
    method = "synthetic" if synthetic is not None else "block" if block_verification else "standard"
    # Timing by rate measures the number of drafts that was asked for.
    adaptive = not fixed and synthetic is None
    return directory, SpeculationOptions(most, method, synthetic, adaptive, recurrent_states)  # type: ignore[arg-type]


def state_memory(session: Any) -> dict[str, int]:
    """Bytes of KDA states, windows and records that a request takes, by the ways to keep states."""
    from stepkernel.runtime.caches import state_bytes

    options = session.engine.options
    return {
        "per-position": options.queries * state_bytes(session.config, options.drafts, 0, options.recurrent_dtype),
        "recovering": state_bytes(session.config, options.drafts, options.queries, options.recurrent_dtype),
    }


def as_dict(session: Any) -> dict[str, Any]:
    """What a run's drafts did, for JSON."""
    speculator = session.speculator
    speculator.settle()
    options = speculator.options
    return {
        "num_speculative_tokens": options.num_speculative_tokens,
        "method": options.method,
        "synthetic": options.is_synthetic,
        "synthetic_acceptance_length": options.synthetic_acceptance_length,
        "adaptive": options.adaptive,
        "recurrent_states": options.recurrent_states,
        "state_bytes_per_request": state_memory(session),
        "rounds_by_drafts": list(speculator.lengths.rounds),
        **speculator.counts.as_dict(),
    }


def lines(session: Any) -> list[str]:
    """The same for readers."""
    speculator = session.speculator
    speculator.settle()
    counts, lengths = speculator.counts, speculator.lengths
    found = []
    if speculator.options.is_synthetic:
        found.append(NOTE)
    rates = (f"{a / d:.2f}" if d else "-" for a, d in zip(counts.accepted, counts.drafted, strict=True))
    found.append(
        f"drafts: {counts.length:.2f} tokens per verification over {counts.verified}; accepted by position "
        f"{' '.join(rates)}"
    )
    if lengths.adaptive:
        used = ", ".join(f"{n} x {k}" for k, n in enumerate(lengths.rounds) if n)
        found.append(f"rounds by number of drafts: {used}" + (f"; {lengths.reason}" if lengths.reason else ""))
    memory = state_memory(session)
    used = speculator.options.recurrent_states
    other = next(name for name in memory if name != used)
    found.append(
        f"KDA states of a request: {memory[used] / 1e6:.2f} MB {used}, {memory[other] / 1e6:.2f} MB if {other}"
    )
    return found
