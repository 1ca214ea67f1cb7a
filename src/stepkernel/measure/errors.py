"""Why a measurement is refused."""

from dataclasses import dataclass

from stepkernel.measure.strict import STRICT


class MeasureError(ValueError):
    """A record, file, server or option that cannot be used; one sentence that says what was found and what to do."""


@dataclass(frozen=True)
class Refusal:
    """A protocol that was not kept. `code` is stable: n-not-reached, prefill-included, warm-up-included, ..."""

    __pydantic_config__ = STRICT
    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"
