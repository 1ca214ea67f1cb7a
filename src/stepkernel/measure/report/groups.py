"""Sorts records into groups that may share a figure, and says why others are kept apart."""

from dataclasses import dataclass
from itertools import combinations

from stepkernel.measure.comparable import Conditions, conditions, differences
from stepkernel.measure.record import Record


@dataclass(frozen=True)
class Named:
    """A record and the name that it goes by in legends."""

    name: str
    record: Record


@dataclass(frozen=True)
class Group:
    conditions: Conditions
    members: tuple[Named, ...]


def groups(records: list[Named]) -> list[Group]:
    """Records of equal conditions together, in the order in which they were given."""
    found: dict[Conditions, list[Named]] = {}
    for named in records:
        found.setdefault(conditions(named.record), []).append(named)
    return [Group(key, tuple(members)) for key, members in found.items()]


def kept_apart(found: list[Group]) -> list[str]:
    """One sentence for each two groups of the same kind of figure."""
    return [
        f"{_names(one)} and {_names(other)} are not joined: "
        f"{'; '.join(differences(one.members[0].record, other.members[0].record))}"
        for one, other in combinations(found, 2)
        if one.conditions.figure == other.conditions.figure
    ]


def _names(group: Group) -> str:
    return ", ".join(member.name for member in group.members)
