"""Sessions of tiny-k3 with its trained draft, and what it says without one."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from stepkernel.runtime.draft_length import DraftLength
from stepkernel.runtime.sequence import StopRules
from stepkernel.runtime.session import Session
from stepkernel.runtime.speculation import SpeculationOptions

ASSETS = Path(__file__).resolve().parents[2] / "assets"
DRAFT = ASSETS / "tiny-k3-dspark"
Open = Callable[..., Session]
TOKENS = 24
RULES = StopRules(max_tokens=TOKENS, ignore_eos=True)


@cache
def prompts() -> list[list[int]]:
    """Eight prompts: one token, and pieces of the golden ones."""
    golden = np.load(ASSETS / "golden" / "k3_batch4.npz")
    found = [[2040], np.load(ASSETS / "golden" / "k3_p3_len17.npz")["prompt_ids"].tolist()]
    for i in range(4):
        found.append(golden[f"r{i}_prompt_ids"].tolist())
    return [*found, found[2][:3], found[3][:16]]


PLAIN: dict[str, list[tuple[int, ...]]] = {}


def plain(open_session: Open, backend: str) -> list[tuple[int, ...]]:
    if backend not in PLAIN:
        session = open_session("tiny-k3", backend)
        PLAIN[backend] = [session.generate([p], rules=RULES)[0].token_ids for p in prompts()]
    return PLAIN[backend]


def speculating(open_session: Open, backend: str, drafts: int, adaptive: bool = False, **options: Any) -> Session:
    method = options.pop("method", "standard")
    length = options.pop("length", None)
    speculation = SpeculationOptions(drafts, method, length, adaptive, options.pop("states", "per-position"))
    return open_session("tiny-k3", backend, draft=DRAFT, speculation=speculation, **options)


def in_order(lengths: DraftLength, order: list[int]) -> None:
    """Chooses these numbers, whatever rounds take."""
    turns, lengths.held = iter(order), 0
    lengths.choose = lambda requests: next(turns)  # type: ignore[method-assign]
