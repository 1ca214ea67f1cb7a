"""Light and dark looks of figures, and how they are written."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH, HEIGHT, DPI = 8.0, 4.6, 130


@dataclass(frozen=True)
class Theme:
    name: str
    background: str
    text: str
    grid: str
    colours: tuple[str, ...]


# Okabe and Ito's colours, told apart by people who see colours differently, in an order that stands out from each
# background; black is left to the text.
THEMES = (
    Theme("light", "#ffffff", "#1b1b1b", "#d9d9d9", ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")),
    Theme("dark", "#16181d", "#e8e8e8", "#3a3d45", ("#56B4E9", "#E69F00", "#2FC79F", "#E39CC4", "#F0E442", "#FF7F3F")),
)


@dataclass(frozen=True)
class Picture:
    """One figure in every theme, as PNG bytes by theme name."""

    slug: str
    title: str
    caption: str
    png: dict[str, bytes]

    def data(self, theme: str) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png[theme]).decode()


def draw(slug: str, title: str, caption: str, fill: Callable[[Axes, Theme], None]) -> Picture:
    """Calls `fill` once per theme on empty axes."""
    return Picture(slug, title, caption, {theme.name: _one(fill, theme) for theme in THEMES})


def _one(fill: Callable[[Axes, Theme], None], theme: Theme) -> bytes:
    settings: Any = {
        "figure.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "text.color": theme.text,
        "axes.labelcolor": theme.text,
        "axes.edgecolor": theme.grid,
        "xtick.color": theme.text,
        "ytick.color": theme.text,
        "grid.color": theme.grid,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=theme.colours),
        "legend.frameon": False,
        "font.size": 10,
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        fill(axes, theme)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            # Outside of the axes, so that it covers no point.
            figure.legend(handles, labels, loc="outside lower center", ncols=2 if max(map(len, labels)) < 45 else 1)
        data = BytesIO()
        figure.savefig(data, format="png", dpi=DPI)
    return data.getvalue()
