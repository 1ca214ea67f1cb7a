"""Small mistakes put into PTX, one at a time: what a test suite must notice.

A mutant changes one line: a barrier or store is gone, an order or scope is weaker, an address, constant, comparison,
operation, branch or register is another one.
"""

import random
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass

_COMPARISONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}
_DIRECTIONS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "ne", "ne": "eq"}
_OPERATIONS = {
    "add.f32": "sub.f32",
    "sub.f32": "add.f32",
    "mul.f32": "add.f32",
    "max.f32": "min.f32",
    "min.s32": "max.s32",
    "rsqrt.approx": "sqrt.approx",
    "ex2.approx": "lg2.approx",
    "shl.b32": "shr.b32",
    "max.u64": "min.u64",
    "redux.sync.max": "redux.sync.min",
}
_MEMORY = re.compile(r"(?:ld|st|atom|red|cp)\.")
_REGISTER = re.compile(r"%(?:rd|r|f|p)\d+")


@dataclass(frozen=True)
class Mutant:
    """`line` counts from 1; `text` is the whole module."""

    kind: str
    line: int
    before: str
    after: str
    text: str


def mutants(ptx: str, count: int, seed: int, lines: Container[int] | None = None) -> list[Mutant]:
    """Up to `count` different mutants, the kinds as evenly as they occur; only of the given lines."""
    rows = ptx.split("\n")
    rng = random.Random(seed)
    by_kind: dict[str, list[tuple[str, int, str]]] = {}
    for number, row in enumerate(rows, 1):
        if (
            row.strip()
            and (lines is None or number in lines)
            and not row.strip().startswith(("//", ".", "$", "ld.param"))
        ):
            for kind, changed in _changes(row, rows[:number], rng):
                if changed != row:
                    by_kind.setdefault(kind, []).append((kind, number, changed))
    for found in by_kind.values():
        rng.shuffle(found)
    chosen: list[tuple[str, int, str]] = []
    while len(chosen) < count and any(by_kind.values()):
        for found in by_kind.values():
            if found and len(chosen) < count:
                chosen.append(found.pop())
    made = []
    for kind, number, changed in chosen:
        text = "\n".join([*rows[: number - 1], changed, *rows[number:]])
        made.append(Mutant(kind, number, _short(rows[number - 1]), _short(changed), text))
    return made


def _short(row: str) -> str:
    return " ".join(row.split())


def _changes(row: str, earlier: list[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Kinds of mistakes that fit a line, and the line with each."""
    if re.search(r"\bbar\.(warp\.)?sync\b", row):
        yield "barrier gone", ""
        return
    if re.search(r"\b(st|red)\.", row):
        yield "store gone", re.sub(r"\b(?:st|red)\.[^;]*;", "", row)
    if _MEMORY.search(row):
        for order in (".acq_rel.", ".acquire.", ".release."):
            yield "order weaker", row.replace(order, ".relaxed.", 1)
        yield "scope narrower", row.replace(".gpu.", ".cta.", 1)
        moved = rng.choice([4, 16, 64])
        yield "address moved", re.sub(r"\[(%rd?\d+)(\+\d+)?\]", lambda m: _moved(m, moved), row, count=1)
    if re.search(r"\b(add|sub|mul|mad|shl|shr|and|or|xor|bfe|prmt|shfl|selp)\.", row):
        step = rng.choice([-1, 1])
        mask = re.search(r"\band\.", row) is not None
        yield (
            "constant off by one",
            re.sub(r", (-?\d+);", lambda m: f", {_near(int(m.group(1)), step, mask)};", row, count=1),
        )
    compared = re.search(r"\bsetp\.(lt|le|gt|ge|eq|ne)\.", row)
    if compared:
        # Real numbers are hardly ever equal, so the other direction there.
        others = _DIRECTIONS if re.search(r"setp\.\w+(\.ftz)?\.f", row) else _COMPARISONS
        yield "comparison", row.replace(compared.group(0), f"setp.{others[compared.group(1)]}.", 1)
    for name, other in _OPERATIONS.items():
        if re.search(rf"(^|\s){re.escape(name)}", row):
            yield "operation", row.replace(name, other, 1)
    if re.match(r"\s*@%p\d+\s+bra", row):
        yield "branch inverted", row.replace("@%p", "@!%p", 1)
    if "shfl.sync.bfly" in row:
        yield "lanes", re.sub(r", (16|8|4|2|1), 31", lambda m: f", {int(m.group(1)) * 2 % 31}, 31", row, count=1)
    if re.match(r"\s*(add|sub|mul|mad|fma|and|or|xor|mma|cvt)\.", row):
        yield "register", _other_register(row, earlier, rng)


def _near(value: int, step: int, mask: bool) -> int:
    """A number next to this one; of a mask, the mask without its lowest bit."""
    return value & (value - 1) if mask else value + step


def _moved(match: re.Match[str], by: int) -> str:
    return f"[{match.group(1)}+{int((match.group(2) or '+0')[1:]) + by}]"


def _other_register(row: str, earlier: list[str], rng: random.Random) -> str:
    """The last operand replaced by another register of its class that was written shortly before."""
    operands = _REGISTER.findall(row)
    if len(operands) < 2:
        return row
    last = operands[-1]
    kind = last.rstrip("0123456789")
    near: list[str] = [name for line in earlier[-40:-1] for name in _REGISTER.findall(line)]
    others = [name for name in near if name != last and name.rstrip("0123456789") == kind]
    if not others:
        return row
    place = row.rindex(last)
    return row[:place] + rng.choice(others) + row[place + len(last) :]
