"""`stepkernel eval tasks`: task quality of a deployment, alone or paired with another."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepkernel.cli.common import check_writable, integers, model_directory, one_line_errors, results

if TYPE_CHECKING:
    from stepkernel.evaluate.answers import Answer


@dataclass(frozen=True)
class Settings:
    """What the questions of all tasks share."""

    repeats: int
    limit: int
    model: str
    temperature: float
    text: Path | None
    data: dict[str, str]
    needles: list[int]
    max_characters: int


LOCAL = ("cloze", "mrcr_v2")
FORMULA = (
    "score = mean over answers; truncated = no right answer before the token limit, counted apart from wrong; "
    "difference = score - baseline over the same questions, with a 95 % bootstrap interval over questions and "
    "McNemar's exact test, or a permutation test where scores are not 0 or 1"
)


@one_line_errors
def tasks(
    target: Annotated[str, typer.Argument(help="http://HOST:PORT of a server, or a model directory for cloze.")],
    names: Annotated[
        str, typer.Option("--tasks", help="cloze, mrcr_v2, gsm8k_cot_llama, aime25, gpqa_diamond.")
    ] = "cloze",
    baseline: Annotated[str | None, typer.Option(help="A second server or directory, asked the same.")] = None,
    repeats: Annotated[int, typer.Option(help="Answers to every question.", min=1)] = 1,
    limit: Annotated[int, typer.Option(help="Most questions of a task.", min=1)] = 200,
    model: Annotated[str, typer.Option(help="Model name at the server; default: its only one.")] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    text: Annotated[Path | None, typer.Option(help="Text of cloze; default: the held-out text.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="TASK=PLACE: questions from there; a directory or file, for mrcr_v2 also a data set of the hub."
        ),
    ] = None,
    needles: Annotated[str, typer.Option(help="Of mrcr_v2: 2, 4, 8.")] = "2,4,8",
    max_characters: Annotated[int, typer.Option(help="Longest conversation of mrcr_v2.", min=1)] = 200_000,
    max_tokens: Annotated[int, typer.Option(help="Of an answer to the harness's tasks.", min=1)] = 32768,
    concurrency: Annotated[int, typer.Option(help="Requests of the harness at a time.", min=1)] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record to this file.")] = None,
) -> None:
    """Ask the questions of tasks; with --baseline compare two sides question by question."""
    from stepkernel.cli.eval_table import print_figures
    from stepkernel.evaluate.answers import by_group, compare_answers, score
    from stepkernel.evaluate.harness import TASKS, harness
    from stepkernel.evaluate.record import AccuracyRecord, write_record
    from stepkernel.measure.record import Environment
    from stepkernel.runtime import provenance

    wanted = [name.strip() for name in names.split(",")]
    strange = [name for name in wanted if name not in (*LOCAL, *TASKS)]
    if strange:
        raise ValueError(f"--tasks {', '.join(strange)}: supported: {', '.join((*LOCAL, *TASKS))}")
    if any(name in TASKS for name in wanted):
        harness()
    places = _places(data or [], wanted)
    sides = [target] if baseline is None else [target, baseline]
    for side in sides:
        if not side.startswith("http"):
            model_directory(side)
            if wanted != ["cloze"]:
                raise ValueError(f"{side}: is no address; the tasks but cloze need a server http://HOST:PORT")
    if json_file is not None:
        check_writable(json_file, "--json")
    settings = Settings(
        repeats, limit, model, temperature, text, places, integers(needles, "--needles"), max_characters
    )
    out = results()
    rows: dict[str, dict[str, float]] = {}
    summary: dict[str, float] = {}
    for name in wanted:
        found: list[list[Answer]] = [_ask(side, name, settings, concurrency, max_tokens) for side in sides]
        for side, answers in zip(sides, found, strict=True):
            label = name if baseline is None else f"{name}, {side}"
            rows[label] = {key: float(value) for key, value in asdict(score(answers)).items()}
            for group, figures in by_group(answers).items() if any(a.group for a in answers) else ():
                rows[f"{label}, {group}"] = {key: float(value) for key, value in asdict(figures).items()}
        first = name if baseline is None else f"{name}, {target}"
        summary.update({f"{name} {key}": value for key, value in rows[first].items()})
        if len(found) == 2:
            paired = compare_answers(found[0], found[1])
            out.print(f"[bold]{name}[/]: {paired}", soft_wrap=True)
            summary.update(
                {f"{name} {key}": float(value) for key, value in asdict(paired).items() if not isinstance(value, str)}
            )
    print_figures("task", rows, out)
    out.print(f"[dim]{FORMULA}.[/]", soft_wrap=True)
    if json_file is not None:
        environment = Environment(
            model=model or target, versions=provenance.versions(), commit=provenance.commit(), server=target
        )
        how = f"{', '.join(wanted)}: up to {limit} questions, {repeats} answers each, temperature {temperature:g}"
        write_record(AccuracyRecord("tasks", environment, how, FORMULA, (), summary, True, {"tasks": rows}), json_file)


def _places(data: list[str], wanted: list[str]) -> dict[str, str]:
    """Where the questions of tasks are, checked before any is asked."""
    from stepkernel.evaluate.harness import TASKS, local_data

    found: dict[str, str] = {}
    for given in data:
        task, equals, place = given.partition("=")
        if not equals or not place or task not in wanted or task == "cloze" or task in found:
            raise ValueError(f"--data {given}: expected TASK=PLACE once for a task of --tasks; cloze takes --text")
        if task in TASKS:
            local_data(Path(place))
        found[task] = place
    return found


def _ask(side: str, name: str, settings: Settings, concurrency: int, max_tokens: int) -> "list[Answer]":
    """The answers of one side to one task."""
    from stepkernel.cli.eval_numerics import held_out
    from stepkernel.evaluate.answers import ServerAsker, SessionAsker
    from stepkernel.evaluate.cloze import ask_cloze, cloze_questions
    from stepkernel.evaluate.harness import ask_harness
    from stepkernel.evaluate.mrcr import DATASET, ask_mrcr, load_mrcr
    from stepkernel.evaluate.windows import read_text
    from stepkernel.runtime.session import Session

    if name == "cloze":
        questions = cloze_questions(read_text(settings.text or held_out()), settings.limit)
        if not side.startswith("http"):
            with Session.open(model_directory(side)) as session:
                return ask_cloze(SessionAsker(session, settings.temperature), questions, settings.repeats)
    if name == "mrcr_v2":
        conversations = load_mrcr(
            settings.data.get(name, DATASET), settings.needles, settings.limit, settings.max_characters
        )
    with ServerAsker(side, settings.model, os.environ.get("OPENAI_API_KEY", ""), settings.temperature) as server:
        if name == "cloze":
            return ask_cloze(server, questions, settings.repeats)
        if name == "mrcr_v2":
            return ask_mrcr(server, conversations, settings.repeats)
        model = server.model
        # What no question can get past, such as a missing chat template, in one line before the harness retries.
        server.ask([({"role": "user", "content": "1"},)], 1)
    place = Path(settings.data[name]) if name in settings.data else None
    return ask_harness(
        name, side, model, settings.limit, settings.repeats, concurrency, max_tokens, settings.temperature, place
    )
