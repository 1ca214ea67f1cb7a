"""Tasks that lm-evaluation-harness has, asked of a chat server, with its prompts and its graders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepkernel.evaluate.answers import Answer

# Our name to the harness's variant: fixed, so that two reports speak of the same questions.
TASKS = {
    "gsm8k_cot_llama": "gsm8k_cot_llama",
    "aime25": "aime25",
    "gpqa_diamond": "gpqa_diamond_cot_zeroshot",
}
METRIC = "exact_match"
SPLITS = ("train", "validation", "test")
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
PREFERRED = ("flexible-extract", "flexible_extract", "none")  # filters, if a task has several


def harness() -> Any:
    """The library, or ValueError that says how to get it."""
    try:
        import lm_eval
    except ImportError:
        raise ValueError(
            "this task needs lm-evaluation-harness: pip install 'stepkernel[eval]'; the tasks cloze and mrcr_v2 do not"
        ) from None
    return lm_eval


def ask_harness(
    task: str,
    address: str,
    model: str,
    limit: int | None,
    repeats: int,
    concurrency: int,
    max_tokens: int,
    temperature: float = 0.0,
    data: Path | None = None,
) -> list[Answer]:
    """Every question once per repeat, with another seed each. ValueError if library, data or server is not there.

    `data`: the questions, instead of the hub's (`local_data`).
    """
    lm_eval = harness()
    chosen: Any = TASKS[task]
    if data is not None:  # a group is how the harness takes one of its own tasks with other settings
        chosen = {"group": f"local {task}", "task": [{"task": TASKS[task], **local_data(data)}]}
    client, finishes = _client(address, model, concurrency, max_tokens)
    found: list[Answer] = []
    for repeat in range(repeats):
        try:
            results = lm_eval.simple_evaluate(
                model=client,
                tasks=[chosen],
                limit=limit,
                log_samples=True,
                apply_chat_template=True,
                bootstrap_iters=0,
                gen_kwargs={"temperature": temperature, "max_gen_toks": max_tokens, "seed": repeat},
            )
        except Exception as error:  # of the harness, of its data sets and of the network
            hint = (
                f"offline, give a copy of the hub's data set with --data {task}=PLACE"
                if data is None
                else f"questions from {data}, which must be as in the hub's data set"
            )
            raise ValueError(f"{task}: {type(error).__name__}: {error} ({hint})") from error
        found += to_answers(results["samples"][TASKS[task]], finishes)
    return found


def local_data(place: Path) -> dict[str, Any]:
    """The harness's settings for a directory as the hub has it, or one file of rows. Raises ValueError."""
    if place.is_dir():
        return {"dataset_path": str(place)}
    if not place.is_file():
        raise ValueError(f"{place}: no such file or directory of questions")
    if place.suffix not in FORMATS:
        raise ValueError(f"{place}: supported are a directory and files {', '.join(FORMATS)}")
    files = dict.fromkeys(SPLITS, str(place))
    return {"dataset_path": FORMATS[place.suffix], "dataset_name": None, "dataset_kwargs": {"data_files": files}}


def to_answers(samples: Sequence[dict[str, Any]], finishes: dict[str, str]) -> list[Answer]:
    """One answer per question from the harness's samples; `finishes` gives the finish reason of each text."""
    filters = {str(sample.get("filter", "none")) for sample in samples}
    chosen = next((name for name in PREFERRED if name in filters), sorted(filters)[0] if filters else "none")
    found = []
    for sample in samples:
        if str(sample.get("filter", "none")) != chosen:
            continue
        if METRIC not in sample:
            raise ValueError(f"the harness's samples have no {METRIC}; this version is not supported")
        text = sample["resps"][0][0]
        value = float(sample[METRIC])
        # An answer given before the limit counts; only one without a right answer is called truncated.
        truncated = finishes.get(text) == "length" and value == 0
        found.append(Answer(f"question {sample['doc_id']}", value, truncated))
    return found


def _client(address: str, model: str, concurrency: int, max_tokens: int) -> tuple[Any, dict[str, str]]:
    """The harness's chat client, which also notes why each text ended."""
    from lm_eval.models.openai_completions import LocalChatCompletion

    finishes: dict[str, str] = {}

    class Watched(LocalChatCompletion):  # type: ignore[misc]
        def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
            texts: list[str] = super().parse_generations(outputs, **kwargs)
            answers = outputs if isinstance(outputs, list) else [outputs]
            reasons = [choice.get("finish_reason") for answer in answers for choice in answer.get("choices", ())]
            finishes.update((t, str(r)) for t, r in zip(texts, reasons, strict=False) if t is not None)
            return texts

    base = address.rstrip("/").removesuffix("/v1")
    client = Watched(
        base_url=f"{base}/v1/chat/completions",
        model=model,
        num_concurrent=concurrency,
        max_gen_toks=max_tokens,
        tokenizer_backend=None,
    )
    return client, finishes
