"""MRCR v2: find the i-th of several alike answers in a long conversation (data set openai/mrcr)."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from stepkernel.evaluate.answers import Answer, Asker, Reply

DATASET = "openai/mrcr"
NEEDLES = (2, 4, 8)
BUCKETS = tuple(4096 << i for i in range(9))  # borders in prompt tokens: 4k, 8k, ... 1M
FIELDS = ("prompt", "answer", "random_string_to_prepend", "n_needles")
MAX_TOKENS = 4096


@dataclass(frozen=True)
class Mrcr:
    """An answer only counts if it starts with `mark`."""

    question: str
    messages: tuple[dict[str, str], ...]
    answer: str
    mark: str
    needles: int
    characters: int


def load_mrcr(source: str, needles: Sequence[int], limit: int, most_characters: int) -> list[Mrcr]:
    """From a local .jsonl file, or from the hub by the name of the data set.

    Raises ValueError that says what to do if the data cannot be had, or a row is not one of MRCR.
    """
    strange = [n for n in needles if n not in NEEDLES]
    if strange:
        raise ValueError(f"needles {strange}: MRCR has {', '.join(map(str, NEEDLES))}")
    file = Path(source)
    rows = _lines(file) if file.is_file() else _hub(source)
    found = []
    for number, row in enumerate(rows):
        question = _question(row, f"{source}, row {number + 1}", number)
        if question.needles in needles and question.characters <= most_characters:
            found.append(question)
        if len(found) == limit:
            break
    if not found:
        raise ValueError(f"{source}: no question with {list(needles)} needles and at most {most_characters} characters")
    return found


def ask_mrcr(asker: Asker, questions: Sequence[Mrcr], repeats: int = 1) -> list[Answer]:
    found = []
    for repeat in range(repeats):
        for question in questions:
            reply = asker.ask([question.messages], MAX_TOKENS, repeat)[0]
            found.append(grade(question, reply))
    return found


def grade(question: Mrcr, reply: Reply) -> Answer:
    """Ratio of matching characters after the mark; 0 without it."""
    group = f"{question.needles} needles, {bucket(reply.prompt_tokens)}"
    if reply.truncated:
        return Answer(question.question, 0.0, True, group)
    if not reply.text.startswith(question.mark):
        return Answer(question.question, 0.0, False, group)
    one, other = (x.removeprefix(question.mark) for x in (reply.text, question.answer))
    return Answer(question.question, SequenceMatcher(None, one, other).ratio(), False, group)


def bucket(tokens: int | None) -> str:
    """The length bucket that a prompt of so many tokens falls in."""
    if tokens is None:
        return "length unknown"
    upper = next((border for border in BUCKETS if tokens <= border), None)
    if upper is None:
        return f"more than {BUCKETS[-1] >> 10}k tokens"
    return f"up to {upper >> 10}k tokens"


def _question(row: Any, place: str, number: int) -> Mrcr:
    missing = [name for name in FIELDS if not isinstance(row, dict) or name not in row]
    if missing:
        raise ValueError(f"{place}: lacks {', '.join(missing)}; expected the fields of {DATASET}")
    try:
        messages = json.loads(row["prompt"])
        turns = tuple({"role": str(m["role"]), "content": str(m["content"])} for m in messages)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{place}: prompt is no list of messages ({error})") from None
    size = sum(len(turn["content"]) for turn in turns)
    mark, needles = str(row["random_string_to_prepend"]), row["n_needles"]
    return Mrcr(f"{place.rpartition(',')[0]} {number}", turns, str(row["answer"]), mark, int(needles), size)


def _lines(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: is not JSON ({error})") from None


def _hub(name: str) -> Iterable[Any]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"{name}: is no file, and reading the hub needs the optional part `pip install 'stepkernel[eval]'`"
        ) from None
    try:
        return load_dataset(name, split="train", streaming=True)  # type: ignore[no-any-return]
    except Exception as error:  # the library raises its own, the network's and the hub's
        raise ValueError(
            f"{name}: cannot be read from the hub ({type(error).__name__}: {error}); offline, give a local .jsonl file "
            "with --data mrcr_v2=FILE"
        ) from None
