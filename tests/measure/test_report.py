"""Pictures and page: what is joined, what is kept apart, and that the page needs nothing else."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from stepkernel.cli.main import app
from stepkernel.measure.cost import read_cost
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.files import read_record, write_record
from stepkernel.measure.pareto import front
from stepkernel.measure.report.groups import Named, groups, kept_apart
from stepkernel.measure.report.page import build_report
from support.records import ENVIRONMENT, decode_record, serve_record
from support.traces import Engine

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
RUNNER = CliRunner()
COST = """
[tiers.rental]
usd_per_chip_hour = 2.0
[tiers.neocloud]
usd_per_chip_hour = 1.0
watts_per_chip = 1000
usd_per_kwh = 0.5
"""


@given(st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(0, 9).map(float)), max_size=30))
def test_front(points: list[tuple[float, float]]) -> None:
    """Exactly the points that no other beats in one coordinate and matches in the other."""
    wanted = {p for p in points if not any(q[0] >= p[0] and q[1] >= p[1] and q != p for q in points)}
    found = front(points)
    assert set(found) == wanted
    assert found == sorted(found)
    assert [y for _, y in found] == sorted((y for _, y in found), reverse=True)  # monotone between them


def test_what_is_joined() -> None:
    base = serve_record()
    apart = {
        "another output length": serve_record(output=16),
        "another dataset": serve_record(dataset="trace.jsonl"),
        "drafts": serve_record(acceptance="natural"),
        "synthetic drafts": serve_record(acceptance="synthetic", acceptance_length=3.78),
        "another length of them": serve_record(acceptance="synthetic", acceptance_length=2.0),
        "another machine": serve_record(environment=replace(ENVIRONMENT, machine={"processor": "Other"})),
        "another model": serve_record(environment=replace(ENVIRONMENT, model="large")),
        "more chips": serve_record(environment=replace(ENVIRONMENT, chips=8)),
    }
    named = [Named("base", base), Named("same", serve_record(Engine(step_ms=5.0)))]
    named += [Named(name, record) for name, record in apart.items()]
    found = groups(named)
    assert [member.name for member in found[0].members] == ["base", "same"]
    assert len(found) == 1 + len(apart)
    reasons = kept_apart(found)
    assert any("drafts are not joined" in r and "acceptance 'none' against 'natural'" in r for r in reasons)
    assert any("'synthetic, length 3.78' against 'synthetic, length 2'" in r for r in reasons)
    # Different kinds of figures need no reason.
    assert kept_apart(groups([Named("a", base), Named("b", decode_record())])) == []


def test_decode_phases_and_replay_are_kept_apart() -> None:
    step = read_record(RECORDS / "step-k3-mini.json")
    named = [Named("a", decode_record()), Named("b", decode_record(mixed=True)), Named("c", step)]
    assert len(groups(named)) == 3
    assert any("phase 'decode' against 'mixed'" in reason for reason in kept_apart(groups(named)))


def test_page_is_self_contained_and_pictures_are_drawn(tmp_path: Path) -> None:
    files = []
    records = {
        "ours": decode_record(baseline=True),
        "sweep": serve_record(limits={"ttft": 50.0}),
        "<b>bold</b>": serve_record(acceptance="natural"),
    }
    for index, record in enumerate(records.values()):
        files.append(tmp_path / f"{index}.json")
        write_record(record, files[-1])
    (tmp_path / "cost.toml").write_text(COST)
    out = tmp_path / "report"
    step = str(RECORDS / "step-kimi-linear-mini.json")
    result = RUNNER.invoke(
        app, ["report", *map(str, files), step, "--out", str(out), "--cost", str(tmp_path / "cost.toml")]
    )
    assert result.exit_code == 0, result.output
    html = (out / "index.html").read_text()
    assert not re.search(r'(src|href|srcset)="(?!data:)', html)
    for text in (
        "prefers-color-scheme: dark",
        "Kept apart",
        "Published by others, not measured here",
        "1.89",
        "natural",
    ):
        assert text in html
    pictures = sorted(out.glob("*.png"))
    assert len(pictures) == html.count('<img src="data:') * 2
    for picture in pictures:
        pixels = np.asarray(Image.open(picture).convert("RGB"), float)
        background = 255 if picture.stem.endswith("light") else 30
        assert abs(pixels[0, 0].max() - background) < 10
        edges = np.concatenate([pixels[:3].ravel(), pixels[-3:].ravel(), pixels[:, :3].ravel(), pixels[:, -3:].ravel()])
        assert np.ptp(edges.reshape(-1, 3), axis=0).max() < 5, f"{picture.name}: something touches the edge"
        assert (np.abs(pixels - pixels[0, 0]).max(axis=2) > 60).mean() > 0.01


def test_text_of_records_cannot_become_markup() -> None:
    named = Named("<script>alert(1)</script>", serve_record(environment=replace(ENVIRONMENT, label="<i>x</i>")))
    html = build_report([named], ()).html
    assert "<script>" not in html
    assert "<i>x" not in html


def test_refused_loads_are_told_and_not_drawn() -> None:
    report = build_report([Named("late", decode_record(Engine(late=120), loads=(4,), output=256))], ())
    assert "prefill-included" in report.html
    assert not any(picture.slug.endswith("steps") for picture in report.pictures)


def test_cost(tmp_path: Path) -> None:
    file = tmp_path / "cost.toml"
    file.write_text(COST)
    rental, neocloud = read_cost(file)
    assert rental.tokens_per_usd(100.0) == pytest.approx(100 * 3600 / 2.0)
    assert neocloud.usd_per_hour == pytest.approx(1.5)
    assert neocloud.usd_per_million(100.0) == pytest.approx(1.5 / (100 * 3600 / 1e6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "is not TOML"),
        ("", "expected tables"),
        ("[tiers.rental]\nusd_per_chip_hour = -1", "expected a number of at least 0"),
        ("[tiers.rental]\nusd_per_chip_hour = 0", "costs nothing"),
        ("[tiers.rental]\nusd_per_chip_hour = nan", "expected a number"),
        ("[tiers.moon]\nusd_per_chip_hour = 1", "supported: hyperscaler, neocloud, rental"),
        ("[tiers.rental]\nprice = 1", "expected usd_per_chip_hour"),
    ],
)
def test_cost_refusals(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "cost.toml"
    file.write_text(text)
    with pytest.raises(MeasureError, match=message):
        read_cost(file)
