"""The local task: the last word of a held-out line. Needs no data set, so it runs everywhere."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stepkernel.evaluate.answers import Answer, Asker, Reply

MAX_TOKENS = 8
WORDS = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True)
class Cloze:
    """prompt: a line without its last word; answer: that word."""

    question: str
    prompt: str
    answer: str


def cloze_questions(text: str, limit: int, least_words: int = 8) -> list[Cloze]:
    """Up to `limit` lines, evenly spread, of at least so many words. Raises ValueError if there are none."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = list(WORDS.finditer(line))
        if len(words) >= least_words:
            last = words[-1]
            found.append(Cloze(f"line {number}", line[: last.start()].rstrip(), last.group()))
    if not found:
        raise ValueError(f"no line of the text has {least_words} words; a longer text is needed")
    count = min(limit, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def ask_cloze(asker: Asker, questions: Sequence[Cloze], repeats: int = 1) -> list[Answer]:
    prompts = [q.prompt for q in questions]
    return [
        grade(question, reply)
        for repeat in range(repeats)
        for question, reply in zip(questions, asker.ask(prompts, MAX_TOKENS, repeat), strict=True)
    ]


def grade(question: Cloze, reply: Reply) -> Answer:
    """Right if the first word is the answer. A first word that the limit may have cut short is truncated."""
    word = WORDS.search(reply.text)
    cut = reply.truncated and (word is None or word.end() == len(reply.text))
    right = word is not None and word.group() == question.answer and not cut
    return Answer(question.question, float(right), cut)
