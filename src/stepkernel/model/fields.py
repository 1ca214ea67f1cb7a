"""Typed access to the fields of a JSON object; errors name file, field, what was found, what is supported."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from stepkernel.model.config import ConfigError

MAX_INT = 2**31 - 1
_SHOWN = 80


def shown(value: object) -> str:
    """The value as JSON, shortened so that an error stays one line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def read_json_object(path: Path) -> dict[str, Any]:
    """Parses a JSON file whose top is an object; refuses duplicate keys, NaN and Infinity (ConfigError)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{path}: key {shown(key)} occurs twice in one object; keep one of them")
            found[key] = value
        return found

    def constant(text: str) -> NoReturn:
        raise ConfigError(f"{path}: found {text}, which is not JSON; supported: finite numbers")

    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path}: not a regular file; expected a file with a JSON object")
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: top level is {shown(raw)}; supported: a JSON object")
    return raw


@dataclass(frozen=True)
class Fields:
    """One JSON object and where it stands: file (`source`) and path, e.g. "text_config"."""

    raw: Mapping[str, Any]
    source: str
    path: str = ""

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def refuse(self, key: str, supported: str) -> NoReturn:
        found = f"found {shown(self.raw[key])}" if key in self.raw else "is absent"
        raise ConfigError(f"{self.source}: {self.name(key)} {found}; supported: {supported}")

    def has(self, key: str) -> bool:
        """True if the key is there and not null."""
        return self.raw.get(key) is not None

    def section(self, key: str) -> Fields:
        value = self.raw.get(key)
        if not isinstance(value, Mapping):
            self.refuse(key, "a JSON object")
        return Fields(value, self.source, self.name(key))

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_INT) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(key, f"a whole number from {low} to {high}")
        return value

    def width(self, key: str, multiple: int) -> int:
        value = self.integer(key)
        if value % multiple:
            self.refuse(key, f"multiples of {multiple}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(key, "a number")
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result) or (positive and result <= 0):
            self.refuse(key, "a finite number above 0" if positive else "a finite number")
        return result

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            self.refuse(key, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.raw.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str):
            self.refuse(key, "a list of whole numbers")
        if any(not isinstance(item, int) or isinstance(item, bool) for item in value):
            self.refuse(key, "a list of whole numbers")
        return tuple(value)

    def require(self, key: str, *allowed: object) -> None:
        """Refuses every value outside `allowed`; an absent key and null count as None."""
        value = self.raw.get(key)
        if not any(value is item or (type(value) is type(item) and value == item) for item in allowed):
            self.refuse(key, " or ".join("absent" if item is None else shown(item) for item in allowed))
