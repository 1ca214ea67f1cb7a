"""The score of the mutation study may not fall; what it does to the kernels' text."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepkernel.cuda.mutation import (
    LEAST,
    Outcome,
    known_reasons,
    last_line_of_walk,
    summary,
    write,
)
from stepkernel.cuda.mutation_trials import PEAKS, without_a_cta
from stepkernel.cuda.spread import Spread
from stepkernel.program.program import reads
from stepkernel.program.stages import Argmax
from support.cuda import PTX, case_of, text


def test_the_recorded_score() -> None:
    found = json.loads((PTX / "mutation.json").read_text())
    assert found["mutants"] >= 500
    assert found["noticed"] + len(found["survivors"]) == found["mutants"]
    assert found["rate"] >= LEAST
    assert sum(found["how"].values()) == found["noticed"]
    assert all(survivor["why"] for survivor in found["survivors"]), "a survivor needs an explanation"
    kinds = {"barrier gone", "store gone", "order weaker", "scope narrower", "address moved", "register", "comparison"}
    assert kinds <= set(found["kinds"])


def test_a_lower_score_is_not_written(tmp_path: Path) -> None:
    def outcomes(noticed: int) -> list[Outcome]:
        return [Outcome("k", "store gone", n, "st", "", "race" if n < noticed else "") for n in range(100)]

    path = tmp_path / "mutation.json"
    with pytest.raises(ValueError, match=r"89\.0% of the mutants"):
        write(path, summary(outcomes(89), "hash"))
    assert not path.exists()
    write(path, summary(outcomes(99), "hash"))
    with pytest.raises(ValueError, match=r"98\.0% of the mutants were noticed, at least 99\.0%"):
        write(path, summary(outcomes(98), "hash"))
    assert json.loads(path.read_text())["rate"] == 0.99


def test_explanations_are_kept(tmp_path: Path) -> None:
    outcomes = [Outcome("k", "store gone", 3, "st", "", ""), Outcome("k", "register", 5, "a", "b", "race")]
    found = summary(outcomes, "hash", {"k: store gone: st -> ": "nobody reads it"})
    assert [survivor["why"] for survivor in found["survivors"]] == ["nobody reads it"]
    (tmp_path / "mutation.json").write_text(json.dumps(found))
    again = summary([replace(outcomes[0], line=99)], "other", known_reasons(tmp_path / "mutation.json"))
    assert again["survivors"][0]["why"] == "nobody reads it"


def test_the_walk_and_its_patience_are_found_in_the_text() -> None:
    ptx = text(case_of("micro_linear_3x1"))
    rows = ptx.split("\n")
    end = last_line_of_walk(ptx)
    assert "bar.sync" in rows[end - 1]
    assert not any(".global.add.u64" in row for row in rows[end:])
    changed = without_a_cta(ptx, 4)
    assert "%nctaid" not in changed
    assert "4194304" not in changed
    assert "4194303" not in changed


def test_peaks_lie_evenly_over_all_tokens() -> None:
    stage = next(stage for stage in case_of("micro_linear_3x1").plan().program.stages if isinstance(stage, Argmax))
    (logits,) = reads(stage)
    found = []
    for number in range(PEAKS):
        buffers = {logits: np.zeros((3, 1536), np.float32)}
        Spread(6, 1.0, peaks=(number, PEAKS)).fill(0, stage, buffers, np.arange(3))
        found += buffers[logits].argmax(axis=1).tolist()
    assert found == [32 * run + (31 if run % 2 else 0) for run in range(48)]
