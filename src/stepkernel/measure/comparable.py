"""Which records may stand in one line, and why others may not."""

from dataclasses import dataclass, fields

from stepkernel.measure.record import Record


@dataclass(frozen=True)
class Conditions:
    """What must agree before two figures are put side by side as one series or one ratio."""

    figure: str
    phase: str
    model: str
    machine: str
    chips: str
    input: str
    output: str
    dataset: str
    sampling: str
    acceptance: str
    source: str

    def text(self) -> str:
        """One line for a caption."""
        return (
            f"{self.phase}; {self.model}; {self.machine}, {self.chips}; input {self.input}, output {self.output}, "
            f"{self.dataset}, {self.sampling}; drafts: {self.acceptance}"
        )


FIGURE = {"step": "step time", "decode": "step time", "serve": "load sweep", "aggregate": "load sweep"}


def conditions(record: Record) -> Conditions:
    protocol, environment = record.protocol, record.environment
    acceptance: str = protocol.acceptance
    if protocol.acceptance_length is not None:
        acceptance += f", length {protocol.acceptance_length:g}"
    how = "direct replay" if record.kind == "step" else str(getattr(record, "source", "stepkernel"))
    return Conditions(
        FIGURE[record.kind],
        f"{protocol.phase}, direct replay" if record.kind == "step" else protocol.phase,
        environment.model,
        environment.hardware or "machine not known",
        f"{environment.chips} chips" if environment.chips != 1 else "1 chip or machine",
        "not told" if protocol.input_len is None else str(protocol.input_len),
        "not told" if protocol.output_len is None else str(protocol.output_len),
        protocol.dataset,
        protocol.sampling,
        acceptance,
        how,
    )


def differences(one: Record, other: Record) -> list[str]:
    """Why two records cannot be joined; empty if they can."""
    a, b = conditions(one), conditions(other)
    return [
        f"{field.name} {getattr(a, field.name)!r} against {getattr(b, field.name)!r}"
        for field in fields(Conditions)
        if getattr(a, field.name) != getattr(b, field.name)
    ]
