"""Options of drafts that are refused, each before weights are read."""

from typing import Any

import pytest

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.config import ConfigError
from stepkernel.runtime.sampling import RequestError
from stepkernel.runtime.session import Session
from stepkernel.runtime.speculation import SpeculationOptions
from support.speculating import ASSETS, DRAFT


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"speculation": None}, RequestError, "go together"),
        ({"speculation": SpeculationOptions(8)}, ConfigError, "8 speculative tokens; supported: 1 to 7"),
        ({"speculation": SpeculationOptions(0)}, ConfigError, "0 speculative tokens"),
        ({"max_requests": 9}, RequestError, r"a step takes up to 64 tokens; lower one of them \(max_requests 8 fits\)"),
        ({"max_context": 4096}, ConfigError, "4103 positions"),
    ],
)
def test_refusals_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[ValueError], message: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "weights", never)
    given = {"draft": DRAFT, "speculation": SpeculationOptions(7)} | options
    with pytest.raises(error, match=message):
        Session.open(ASSETS / "tiny-k3", **given)
    with pytest.raises(ConfigError, match="the target model has"):
        Session.open(ASSETS / "tiny-kimi-linear", draft=DRAFT, speculation=SpeculationOptions(3))


def test_refused_options() -> None:
    for wrong, message in (
        ({"method": "fly"}, "acceptance method 'fly'"),
        ({"recurrent_states": "two"}, "recurrent_states 'two': supported: per-position, recovering"),
        ({"method": "synthetic"}, "goes with the method synthetic"),
        ({"synthetic_acceptance_length": 2.0}, "goes with the method synthetic"),
        ({"method": "synthetic", "synthetic_acceptance_length": 9.0}, "from 1 to 4"),
    ):
        with pytest.raises(RequestError, match=message):
            SpeculationOptions(3, **wrong)  # type: ignore[arg-type]


def test_refused_cache_types() -> None:
    with pytest.raises(RequestError, match="recurrent_dtype 'fp8': supported: float32, bfloat16"):
        Session.open(ASSETS / "tiny-k3", recurrent_dtype="fp8")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="kv_cache_dtype 'int8': supported: bfloat16, fp8"):
        Session.open(ASSETS / "tiny-k3", kv_cache_dtype="int8")  # type: ignore[arg-type]
