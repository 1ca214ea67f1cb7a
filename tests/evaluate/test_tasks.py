"""Cloze on tiny-k3 in process and through a server; grading; MRCR rows; comparison of two sides."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepkernel.evaluate import harness
from stepkernel.evaluate.answers import (
    Answer,
    Reply,
    ServerAsker,
    SessionAsker,
    by_group,
    compare_answers,
    score,
)
from stepkernel.evaluate.cloze import Cloze, ask_cloze, cloze_questions, grade
from stepkernel.evaluate.harness import to_answers
from stepkernel.evaluate.mrcr import ask_mrcr, bucket, load_mrcr
from stepkernel.measure.errors import MeasureError
from stepkernel.runtime.session import Session
from support.golden import ASSETS
from support.openai_server import OpenAiServer, served

LIMIT = 12


def test_cloze_in_process_and_through_a_server() -> None:
    questions = cloze_questions((ASSETS / "kjv-heldout.txt").read_text(), LIMIT)
    assert len(questions) == LIMIT
    with Session.open(ASSETS / "tiny-k3", threads=1, max_context=256) as session:
        asker = SessionAsker(session)
        here = ask_cloze(asker, questions)
        with (
            served(OpenAiServer(lambda prompt, most: asker.ask([prompt], most)[0])) as address,
            ServerAsker(address) as server,
        ):
            there = ask_cloze(server, questions)
    assert here == there
    found = score(here)
    assert found.correct + found.wrong + found.truncated == pytest.approx(1)
    assert 0 < found.correct < 1, "a trained model knows some last words and not all"
    assert not compare_answers(here, there).differs


@pytest.mark.parametrize(
    ("text", "truncated", "expected"),
    [
        (" Israel, and", True, (1.0, False)),
        (" Israel.", False, (1.0, False)),
        (" Isr", True, (0.0, True)),
        (" Israel", True, (0.0, True)),  # the word might go on
        (" Israelites", False, (0.0, False)),
        (" the people", True, (0.0, False)),
        ("", True, (0.0, True)),
        ("", False, (0.0, False)),
    ],
)
def test_cloze_grading(text: str, truncated: bool, expected: tuple[float, bool]) -> None:
    answer = grade(Cloze("q", "the children of", "Israel"), Reply(text, truncated))
    assert (answer.score, answer.truncated) == expected


def row(needles: int, question: str, answer: str) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    mark = "aB3xY"
    return {
        "prompt": json.dumps(messages),
        "answer": mark + answer,
        "random_string_to_prepend": mark,
        "n_needles": needles,
    }


def test_mrcr(tmp_path: Path) -> None:
    file = tmp_path / "mrcr.jsonl"
    rows = [row(2, "exact", "a poem"), row(2, "no mark", "a poem"), row(8, "half", "abcd"), row(4, "long", "x")]
    file.write_text("\n".join(json.dumps(r) for r in rows))
    questions = load_mrcr(str(file), (2, 8), 10, 1000)
    assert [q.needles for q in questions] == [2, 2, 8]
    replies = {
        "exact": Reply("aB3xYa poem", False, 4000),
        "no mark": Reply("a poem", False, 9000),
        "half": Reply("aB3xYab", False, None),
    }
    with (
        served(OpenAiServer(lambda prompt, most: replies[prompt[0]["content"]])) as address,  # type: ignore[index]
        ServerAsker(address) as server,
    ):
        answers = ask_mrcr(server, questions)
    assert [a.score for a in answers] == [1.0, 0.0, pytest.approx(2 / 3)]
    groups = by_group(answers)
    assert list(groups) == ["2 needles, up to 16k tokens", "2 needles, up to 4k tokens", "8 needles, length unknown"]
    assert bucket(4096) == "up to 4k tokens"
    assert bucket(4097) == "up to 8k tokens"
    assert bucket(2 << 20) == "more than 1024k tokens"


@pytest.mark.parametrize(
    ("line", "says"),
    [("{", "line 1: is not JSON"), ('{"prompt": "[]"}', "lacks answer"), ("[]", "lacks prompt")],
)
def test_mrcr_refusals(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "mrcr.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=says):
        load_mrcr(str(file), (2,), 10, 1000)
    with pytest.raises(ValueError, match="MRCR has 2, 4, 8"):
        load_mrcr(str(file), (3,), 10, 1000)


def test_harness_samples_count_truncation_apart() -> None:
    samples = [
        {"doc_id": 0, "filter": "strict-match", "resps": [["no"]], "exact_match": 0.0},
        {"doc_id": 0, "filter": "flexible-extract", "resps": [["4"]], "exact_match": 1.0},
        {"doc_id": 1, "filter": "flexible-extract", "resps": [["let me th"]], "exact_match": 0.0},
        {"doc_id": 2, "filter": "flexible-extract", "resps": [["5"]], "exact_match": 0.0},
    ]
    found = to_answers(samples, {"4": "length", "let me th": "length", "5": "stop"})
    assert found == [
        Answer("question 0", 1.0, False),
        Answer("question 1", 0.0, True),
        Answer("question 2", 0.0, False),
    ]


def test_comparison_needs_the_same_questions() -> None:
    one = [Answer("a", 1.0, False), Answer("b", 0.0, False)]
    with pytest.raises(ValueError, match="other questions, for example b"):
        compare_answers(one, [one[0]])
    repeated = [*one, Answer("a", 0.0, False), Answer("b", 0.0, False)]
    assert compare_answers(repeated, one).difference == pytest.approx(-0.25)


def test_server_errors_are_one_line() -> None:
    with pytest.raises(MeasureError, match="no answer"):
        ServerAsker("http://127.0.0.1:9")
    with (
        served(OpenAiServer(lambda prompt, most: Reply("", False))) as address,
        ServerAsker(address) as server,
        pytest.raises(MeasureError, match="HTTP 404"),
    ):
        server.post("/nowhere", {})


def test_the_harness_is_asked_with_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in with the library's interface: it and its data sets are an optional part."""
    asked = []

    def simple_evaluate(**options: object) -> dict[str, object]:
        asked.append(options)
        sample = {"doc_id": 7, "filter": "flexible-extract", "resps": [["cut of"]], "exact_match": 0.0}
        return {"samples": {"gpqa_diamond_cot_zeroshot": [sample]}}

    monkeypatch.setattr(harness, "harness", lambda: SimpleNamespace(simple_evaluate=simple_evaluate))
    monkeypatch.setattr(harness, "_client", lambda *a: ("client", {"cut of": "length"}))
    found = harness.ask_harness("gpqa_diamond", "http://x", "m", 5, 2, 4, 99, 0.7)
    assert found == [Answer("question 7", 0.0, True)] * 2
    assert [options["gen_kwargs"] for options in asked] == [
        {"temperature": 0.7, "max_gen_toks": 99, "seed": seed} for seed in (0, 1)
    ]
    assert asked[0]["tasks"] == ["gpqa_diamond_cot_zeroshot"]
    assert asked[0]["limit"] == 5


def test_questions_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = tmp_path / "q.jsonl", []
    file.write_text("{}")
    sample = {"doc_id": 0, "filter": "none", "resps": [["x"]], "exact_match": 1.0}

    def simple_evaluate(**options: object) -> dict[str, object]:
        asked.append(options["tasks"])
        return {"samples": {"aime25": [sample]}}

    monkeypatch.setattr(harness, "harness", lambda: SimpleNamespace(simple_evaluate=simple_evaluate))
    monkeypatch.setattr(harness, "_client", lambda *a: ("client", {}))
    assert harness.ask_harness("aime25", "http://x", "m", 1, 1, 1, 9, data=file) == [Answer("question 0", 1.0, False)]
    [[group]] = asked
    [task] = group["task"]
    assert (task["task"], task["dataset_path"], task["dataset_name"]) == ("aime25", "json", None)
    assert set(task["dataset_kwargs"]["data_files"].values()) == {str(file)}
    assert harness.local_data(tmp_path) == {"dataset_path": str(tmp_path)}


@pytest.mark.parametrize(("name", "says"), [("none.jsonl", "no such file"), ("q.txt", "supported are a directory")])
def test_questions_from_nowhere(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "q.txt").write_text("")
    with pytest.raises(ValueError, match=says):
        harness.local_data(tmp_path / name)


def test_a_missing_harness_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"pip install 'stepkernel\[eval\]'"):
        harness.harness()
