"""The cost model: a TOML file with what an hour of one chip costs, by tier.

[tiers.rental]
usd_per_chip_hour = 0.0     # price of one accelerator (or machine) for an hour
watts_per_chip = 0.0        # optional: power that is paid on top
usd_per_kwh = 0.0           # optional, with watts_per_chip
"""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepkernel.measure.errors import MeasureError
from stepkernel.measure.files import read_text

TIERS = ("hyperscaler", "neocloud", "rental")
FIELDS = ("usd_per_chip_hour", "watts_per_chip", "usd_per_kwh")


@dataclass(frozen=True)
class Tier:
    name: str
    usd_per_chip_hour: float
    watts_per_chip: float = 0.0
    usd_per_kwh: float = 0.0

    @property
    def usd_per_hour(self) -> float:
        """Of one chip, power included."""
        return self.usd_per_chip_hour + self.watts_per_chip / 1e3 * self.usd_per_kwh

    def tokens_per_usd(self, tokens_per_second_per_chip: float) -> float:
        return tokens_per_second_per_chip * 3600 / self.usd_per_hour

    def usd_per_million(self, tokens_per_second_per_chip: float) -> float:
        """$/chip-hour / (tokens/s/chip * 3600 / 1e6)."""
        return self.usd_per_hour / (tokens_per_second_per_chip * 3600 / 1e6)


def read_cost(file: Path) -> tuple[Tier, ...]:
    """Tiers of a cost file, in the file's order."""
    try:
        found = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise MeasureError(f"{file}: is not TOML ({error})") from None
    tiers = found.get("tiers")
    if set(found) != {"tiers"} or not isinstance(tiers, dict) or not tiers:
        raise MeasureError(
            f"{file}: expected tables [tiers.NAME] and nothing else, found {', '.join(found) or 'nothing'}"
        )
    return tuple(_tier(name, content, file) for name, content in tiers.items())


def _tier(name: str, content: Any, file: Path) -> Tier:
    if name not in TIERS:
        raise MeasureError(f"{file}: tier {name!r}; supported: {', '.join(TIERS)}")
    if not isinstance(content, dict) or not set(content) <= set(FIELDS) or FIELDS[0] not in content:
        raise MeasureError(f"{file}: tiers.{name}: expected {FIELDS[0]}, and optionally {' and '.join(FIELDS[1:])}")
    for key, value in content.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise MeasureError(f"{file}: tiers.{name}.{key} is {value!r}; expected a number of at least 0")
    found = Tier(name, **{key: float(value) for key, value in content.items()})
    if found.usd_per_hour <= 0:
        raise MeasureError(f"{file}: tiers.{name}: an hour costs nothing, so tokens per dollar have no meaning")
    return found
