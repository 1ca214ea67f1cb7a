"""Interactivity against throughput or tokens per dollar, with the front of points that no other beats."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from stepkernel.measure.claim import acceptance
from stepkernel.measure.compare import figures
from stepkernel.measure.cost import Tier
from stepkernel.measure.pareto import Point, front
from stepkernel.measure.record import AggregateRecord, ServeRecord
from stepkernel.measure.report.groups import Group, Named
from stepkernel.measure.report.theme import Picture, Theme, draw

X, RATE = "interactivity_p90", "output_rate_per_chip"
FALLBACK = "interactivity_p50"


def sweep_pictures(group: Group, tiers: Sequence[Tier], slug: str) -> list[Picture]:
    """One picture per tier of the cost model; without one, a picture of output tokens per second per chip."""
    key = X if any(X in values for member in group.members for values in _figures(member).values()) else FALLBACK
    found = []
    for tier in tiers or (None,):
        series = [(member.name, _points(member, key, tier)) for member in group.members]
        series = [(name, points) for name, points in series if points]
        if series:
            found.append(_picture(group, series, key, tier, slug))
    return found


def latency_picture(member: Named, slug: str) -> Picture | None:
    """Distribution of time to first token by concurrency; None without raw requests."""
    if not isinstance(member.record, ServeRecord):
        return None
    curves = [
        (f"{block.running_requests} at a time", sorted(r.ttft_ms for r in block.requests if r.ttft_ms is not None))
        for block in member.record.blocks
    ]
    curves = [(label, samples) for label, samples in curves if samples]
    if not curves:
        return None

    def fill(axes: Axes, theme: Theme) -> None:
        for label, samples in curves:
            axes.step(samples, np.arange(1, len(samples) + 1) / len(samples), where="post", label=label)
        axes.set_xlabel("time to first token (ms)")
        axes.set_ylabel("share of requests at or below")
        axes.set_ylim(0, 1)
        axes.set_xlim(left=0)

    protocol = member.record.protocol
    text = f"{member.name}: load sweep, {protocol.dataset} prompts, {acceptance(protocol)}; TTFT = first chunk - sent"
    return draw(slug, f"Time to first token: {member.name}", text, fill)


def _picture(
    group: Group, series: list[tuple[str, list[tuple[int, Point]]]], key: str, tier: Tier | None, slug: str
) -> Picture:
    best = front([point for _, points in series for _, point in points])
    unit = "output tokens/s per chip" if tier is None else f"output tokens per US dollar ({tier.name})"

    def fill(axes: Axes, theme: Theme) -> None:
        for name, points in series:
            line = axes.plot([x for _, (x, _) in points], [y for _, (_, y) in points], marker="o", label=name)[0]
            for load, point in points:
                axes.annotate(
                    str(load), point, xytext=(5, 5), textcoords="offset points", color=line.get_color(), fontsize=9
                )
        if len(best) > 1:
            axes.plot(
                [x for x, _ in best],
                [y for _, y in best],
                linestyle=":",
                color=theme.text,
                label="front of non-dominated points; between them an estimate",
            )
        axes.set_xlabel(f"interactivity, {key[-3:].upper()} (tokens/s per user)")
        axes.set_ylabel(unit)
        axes.margins(0.12)
        axes.set_ylim(bottom=0)

    price = ""
    if tier is not None:
        price = (
            f" Tokens per dollar = tokens/s/chip * 3600 / $ per chip-hour; {tier.name}: {tier.usd_per_hour:.4g} $ per "
            "chip-hour, power included."
        )
    text = (
        f"{group.conditions.text()}. Interactivity = 1 / TPOT at the percentile of TPOT (the slow tail); numbers at "
        f"points: requests in flight.{price}"
    )
    name = slug if tier is None else f"{slug}-{tier.name}"
    return draw(name, f"Interactivity against {unit}", text, fill)


def _figures(member: Named) -> dict[int, dict[str, float]]:
    return figures(member.record) if isinstance(member.record, ServeRecord | AggregateRecord) else {}


def _points(member: Named, key: str, tier: Tier | None) -> list[tuple[int, Point]]:
    """(concurrency, (interactivity, throughput or tokens per dollar)) by concurrency."""
    found = []
    for load, values in sorted(_figures(member).items()):
        if key in values and RATE in values:
            rate = values[RATE]
            found.append((load, (values[key], rate if tier is None else tier.tokens_per_usd(rate))))
    return found
