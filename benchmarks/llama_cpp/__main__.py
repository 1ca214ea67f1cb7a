"""python -m benchmarks.llama_cpp MODEL... --llama-python PYTHON --gguf DIR: see README.md."""

import argparse
from pathlib import Path

from rich.console import Console

from .compare import Disagreement, Setting, compare
from .report import FORMULA, PROTOCOL, print_comparison, write_record
from .worker import WorkerError

FLAGS = {
    "mmap": "map the file instead of reading it",
    "unified": "one cache for all sequences",
    "plain-attention": "no flash attention",
}
TABLE_WIDTH = 130
BUILD = "llama-cpp-python from source, native instructions (GGML_NATIVE=ON), OpenMP"


def main() -> None:
    arguments = _parser().parse_args()
    options = [f"--{name}" for name in FLAGS if getattr(arguments, name.replace("-", "_"))]
    setting = Setting(
        arguments.llama_python,
        arguments.gguf,
        arguments.running_requests,
        arguments.threads,
        arguments.context,
        arguments.steps,
        arguments.rounds,
        arguments.activation_bits,
        options,
    )
    console, messages = Console(highlight=False), Console(stderr=True, highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    done = []
    try:
        for model in arguments.models:
            with messages.status("starting") as status:
                say = status.update if messages.is_terminal else messages.print
                done.append(compare(model, setting, say))
            print_comparison(done[-1], console)
            if arguments.record is not None:
                write_record(done, setting, arguments.llama_build, arguments.record)
    except (Disagreement, WorkerError, ValueError, OSError) as error:
        raise SystemExit(f"benchmarks.llama_cpp: {error}") from None
    for line in (PROTOCOL, FORMULA):
        console.print(f"[dim]{line}.[/]")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.llama_cpp",
        description="Times the CPU step and llama.cpp side by side on the same checkpoints.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="checkpoint directory")
    parser.add_argument("--llama-python", type=Path, required=True, help="interpreter with requirements.txt installed")
    parser.add_argument("--gguf", type=Path, required=True, help="directory for converted models")
    parser.add_argument("--running-requests", type=_numbers, default=[1, 2, 4, 8], metavar="N,N")
    parser.add_argument("--threads", type=_numbers, default=[2, 1], metavar="N,N")
    parser.add_argument("--context", type=int, default=16, help="tokens that each request already holds")
    parser.add_argument("--steps", type=int, default=60, help="timed steps in a block")
    parser.add_argument("--rounds", type=int, default=2, help="times A B B A")
    parser.add_argument("--activation-bits", type=int, default=15, choices=(8, 15), help="ours, for MXFP4 experts")
    for flag, text in FLAGS.items():
        parser.add_argument(f"--{flag}", action="store_true", help=f"llama.cpp: {text}")
    parser.add_argument("--llama-build", default=BUILD, help="how llama.cpp was built, for the record")
    parser.add_argument("--record", type=Path, help="write everything to this JSON file")
    return parser


if __name__ == "__main__":
    main()
