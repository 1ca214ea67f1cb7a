"""From the events of a stream to a trace: which events are chunks with tokens, and how many tokens each brought."""

import json
from dataclasses import dataclass, field
from typing import Any

from stepkernel.measure.trace import Request, Status


@dataclass
class Arrivals:
    """A stream as it came in. Times in seconds of perf_counter."""

    sent: float = 0.0
    ended: float = 0.0
    status: Status = "ok"
    error: str = ""
    http_status: int = 0
    events: list[tuple[float, str]] = field(default_factory=list)


def to_request(found: Arrivals, wave: int, zero: float) -> Request:
    """Counts tokens by the usage in every chunk; else one per chunk with text, if the total confirms it."""
    status, error = found.status, found.error
    chunks: list[tuple[float, int]] = []
    counted, seen, prompt, total = False, 0, None, None
    for arrived, data in found.events:
        if data == "[DONE]":
            continue
        try:
            event = json.loads(data)
        except json.JSONDecodeError:
            status, error = "error", f"a chunk is not JSON: {data[:80]!r}"
            break
        if "error" in event:
            status, error = "error", _message(event["error"])
            break
        choices, usage = event.get("choices") or [], event.get("usage")
        if usage:
            prompt, total = usage.get("prompt_tokens", prompt), usage.get("completion_tokens", total)
        if choices and usage:
            counted = True
            if total is not None and total > seen:
                chunks.append((arrived, total - seen))
                seen = total
        elif choices and not counted and _has_text(choices[0]):
            chunks.append((arrived, 1))
    # The total cannot be told from an unfinished stream unless every chunk counts.
    if total is None and status == "ok" and not chunks:
        status, error = "error", "the stream ended without a token"
    exact = counted or total == len(chunks)
    times = tuple(round(1e3 * (arrived - zero), 4) for arrived, _ in chunks)
    return Request(
        sent_ms=round(1e3 * (found.sent - zero), 4),
        first_ms=times[0] if times else None,
        last_ms=times[-1] if times else None,
        ended_ms=round(1e3 * (found.ended - zero), 4),
        input_tokens=prompt,
        output_tokens=total,
        chunk_ms=times,
        chunk_tokens=tuple(tokens for _, tokens in chunks) if exact else None,
        wave=wave,
        status=status,
        error=error[:300],
    )


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(
        choice.get("text")
        or choice.get("token_ids")
        or delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("reasoning")
    )


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
