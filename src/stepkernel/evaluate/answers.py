"""Questions, who answers them, and how answers are counted: truncation apart from wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from stepkernel.evaluate.statistics import PairedResult, compare_paired
from stepkernel.measure.errors import MeasureError
from stepkernel.runtime.sampling import Sampling
from stepkernel.runtime.sequence import StopRules
from stepkernel.runtime.session import Session

Prompt = str | tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Reply:
    """truncated: the token limit ended it. prompt_tokens: as the server counts; None if it does not tell."""

    text: str
    truncated: bool
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Answer:
    """One question answered once. score: 0 to 1; truncated: no answer within the limit, score 0."""

    question: str
    score: float
    truncated: bool
    group: str = ""


@dataclass(frozen=True)
class Score:
    """score: mean over answers. correct, wrong, truncated: shares; partly right answers count as wrong here."""

    answers: int
    score: float
    correct: float
    wrong: float
    truncated: float


class Asker(Protocol):
    """Whoever answers prompts: a session in this process or a server."""

    def ask(self, prompts: Sequence[Prompt], max_tokens: int, repeat: int = 0) -> list[Reply]: ...


@dataclass(frozen=True)
class SessionAsker:
    session: Session
    temperature: float = 0.0

    def ask(self, prompts: Sequence[Prompt], max_tokens: int, repeat: int = 0) -> list[Reply]:
        texts = [p for p in prompts if isinstance(p, str)]
        if len(texts) != len(prompts):
            raise ValueError("messages need a chat server; a session takes text")
        sampling = Sampling(self.temperature, seed=repeat)
        found = self.session.generate(texts, sampling, StopRules(max_tokens=max_tokens))
        return [Reply(r.text or "", r.finish_reason in ("length", "context"), len(r.prompt_token_ids)) for r in found]


class ServerAsker:
    """An OpenAI-compatible server; text goes to /v1/completions, messages to /v1/chat/completions."""

    def __init__(
        self, address: str, model: str = "", key: str = "", temperature: float = 0.0, seconds: float = 600
    ) -> None:
        import httpx2

        self.address, self.temperature = address.rstrip("/").removesuffix("/v1"), temperature
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self._client = httpx2.Client(base_url=self.address, timeout=seconds, headers=headers, trust_env=False)
        try:
            self.model = model or self._only_model()
        except BaseException:
            self._client.close()
            raise

    def ask(self, prompts: Sequence[Prompt], max_tokens: int, repeat: int = 0) -> list[Reply]:
        return [self._one(prompt, max_tokens, repeat) for prompt in prompts]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer; MeasureError names the address and what came back."""
        return self._request("POST", path, {"model": self.model, **body})

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> "ServerAsker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _one(self, prompt: Prompt, max_tokens: int, repeat: int) -> Reply:
        body = {"max_tokens": max_tokens, "temperature": self.temperature, "seed": repeat}
        if isinstance(prompt, str):
            answer = self.post("/v1/completions", {"prompt": prompt, **body})
        else:
            answer = self.post("/v1/chat/completions", {"messages": list(prompt), **body})
        try:
            choice = answer["choices"][0]
            text = choice["text"] if isinstance(prompt, str) else choice["message"]["content"] or ""
            usage = answer.get("usage") or {}
            return Reply(str(text), choice["finish_reason"] == "length", usage.get("prompt_tokens"))
        except (KeyError, IndexError, TypeError):
            raise MeasureError(f"{self.address}: the answer lacks choices[0] with text and finish_reason") from None

    def _only_model(self) -> str:
        answer = self._request("GET", "/v1/models", None)
        try:
            names = [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError):
            raise MeasureError(f"{self.address}/v1/models: no list of models; give --model") from None
        if len(names) != 1:
            raise MeasureError(f"{self.address}: serves {', '.join(names) or 'no model'}; choose with --model")
        return names[0]

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        import httpx2

        try:
            answer = self._client.request(method, path, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise MeasureError(f"{self.address}{path}: no answer ({type(error).__name__}: {error})") from None
        if answer.status_code != 200:
            text = " ".join(answer.text.split())[:300]
            raise MeasureError(f"{self.address}{path}: HTTP {answer.status_code}: {text}")
        try:
            return answer.json()
        except ValueError:
            raise MeasureError(f"{self.address}{path}: the answer is not JSON") from None


def score(answers: Sequence[Answer]) -> Score:
    """Raises ValueError if there are none."""
    count = len(answers)
    if not count:
        raise ValueError("no answers; nothing to score")
    truncated = sum(a.truncated for a in answers)
    correct = sum(a.score == 1 and not a.truncated for a in answers)
    mean = sum(a.score for a in answers) / count
    return Score(count, mean, correct / count, (count - truncated - correct) / count, truncated / count)


def by_group(answers: Sequence[Answer]) -> dict[str, Score]:
    groups = sorted({a.group for a in answers})
    return {group: score([a for a in answers if a.group == group]) for group in groups}


def compare_answers(side: Sequence[Answer], baseline: Sequence[Answer], seed: int = 0) -> PairedResult:
    """Means over repeats of the same questions. Raises ValueError if the questions differ."""
    one, other = _by_question(side), _by_question(baseline)
    if one.keys() != other.keys():
        strange = sorted(one.keys() ^ other.keys())[:3]
        raise ValueError(f"the sides answered other questions, for example {', '.join(strange)}")
    return compare_paired([one[q] for q in one], [other[q] for q in one], seed)


def _by_question(answers: Sequence[Answer]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for answer in answers:
        found.setdefault(answer.question, []).append(answer.score)
    return {question: sum(scores) / len(scores) for question, scores in found.items()}
