"""The picture of a numerics record: KL by position, router agreement by layer."""

from pathlib import Path

import numpy as np

from stepkernel.evaluate.record import AccuracyRecord

COLOURS = ("#2a6f97", "#e07a5f", "#81b29a", "#6d597a")
SMOOTH = 8
FLOOR = 1e-10  # below it a logarithmic axis only shows noise


def draw(record: AccuracyRecord, file: Path) -> None:
    """Writes .png, .svg or .pdf by the file's ending. Raises ValueError for others."""
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{file}: pictures are written as .png, .svg or .pdf")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    routers = record.tables["router agreement by layer"]
    for colour, pair in zip(COLOURS, routers, strict=False):
        values = np.array(record.series[f"kl by position, {pair}"])
        width = min(SMOOTH, len(values))
        smooth = np.convolve(values, np.ones(width) / width, "valid")
        left.plot(np.arange(len(smooth)) + width, np.maximum(smooth, FLOOR), color=colour, lw=1.4, label=pair)
        layers = sorted(routers[pair], key=int)
        right.plot([int(x) for x in layers], [100 * routers[pair][x] for x in layers], "o-", color=colour, ms=3, lw=1)
    limit = next((x.at_most for x in record.limits if x.figure == "mean_kl"), None)
    if limit is not None:
        left.axhline(limit, color="#999999", lw=0.8, ls="--")
        left.text(
            0.01,
            limit,
            " limit of the mean",
            va="bottom",
            fontsize=7,
            color="#777777",
            transform=left.get_yaxis_transform(),
        )
    left.set(
        yscale="log", xlabel="position in the sequence", ylabel="KL, nats", title=f"KL by position (mean of {SMOOTH})"
    )
    right.set(xlabel="MoE layer", ylabel="% of rows", title="same set of experts")
    left.legend(frameon=False, fontsize=7)
    for axes in (left, right):
        axes.grid(color="#eeeeee")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    figure.savefig(file, dpi=150)
