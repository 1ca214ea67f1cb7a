"""One sentence that says what was measured, or the reason why it cannot be said."""

from stepkernel.measure.decode import DecodeResult
from stepkernel.measure.digits import digits
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.record import DecodeRecord, Protocol, Record, ServeRecord, StepRecord

COALESCED = 1.02  # tokens per step above this need drafts to explain them


def claim(record: Record, running_requests: int) -> str:
    """The sentence for one load. MeasureError names everything that is missing for it."""
    missing = _missing(record)
    if missing:
        raise MeasureError(f"no claim can be made: {'; '.join(missing)}")
    if isinstance(record, DecodeRecord):
        return f"{_opening(record, running_requests)}: {_decode(record, running_requests)}"
    if isinstance(record, StepRecord):
        return f"{_opening(record, running_requests)}: {_step(record, running_requests)}"
    if isinstance(record, ServeRecord):
        return f"{_opening(record, running_requests)}: {_serve(record, running_requests)}"
    raise MeasureError(
        "no claim can be made: the record holds figures that another tool computed and no raw samples; quote that tool"
    )


def _missing(record: Record) -> list[str]:
    environment, protocol = record.environment, record.protocol
    found = []
    if not environment.hardware:
        found.append("the server's machine is not known (give --machine when measuring)")
    if not environment.versions.keys() - {"client"}:
        found.append("no version of what was measured is known (give --server-version when measuring)")
    if record.kind == "decode" and protocol.output_len is None:
        found.append("the output length is not one number")
    if record.kind == "decode" and protocol.input_len is None:
        found.append("the input length is not one number")
    if protocol.acceptance == "unknown":
        found.append("it is not known how drafts were accepted (--acceptance)")
    if protocol.acceptance == "synthetic" and protocol.acceptance_length is None:
        found.append("drafts were accepted synthetically, but the length is not in the record")
    return found


def _opening(record: Record, running: int) -> str:
    environment, protocol = record.environment, record.protocol
    phase = {"decode": "decode alone", "mixed": "decode under mixed load", "serve": "load sweep"}[protocol.phase]
    chips = f", {environment.chips} chips" if environment.chips > 1 else ""
    threads = "" if environment.threads is None else f", {environment.threads} threads"
    commit = f", commit {environment.commit}" if environment.commit else ""
    lengths = ""
    if record.kind != "step":
        lengths = f", input {_length(protocol.input_len)}, output {_length(protocol.output_len)}"
    return (
        f"On {environment.hardware}{chips}{threads}, {environment.model}{commit}, {phase}, at {running} running "
        f"request{'s' if running != 1 else ''}{lengths}, {protocol.dataset} prompts, {protocol.sampling}, "
        f"{acceptance(protocol)}"
    )


def acceptance(protocol: Protocol) -> str:
    """How drafts were accepted, in words."""
    if protocol.acceptance == "none":
        return "no drafts"
    if protocol.acceptance == "synthetic":
        return f"drafts accepted synthetically at length {protocol.acceptance_length:g}"
    return "drafts accepted naturally" if protocol.acceptance == "natural" else "drafts not told"


def _decode(record: DecodeRecord, running: int) -> str:
    result = _result(record, running)
    side = result.measured
    if side is None:
        raise MeasureError(f"no claim can be made: {'; '.join(str(refusal) for refusal in result.refusals)}")
    if record.protocol.acceptance == "none" and side.estimate == "gaps" and (side.tokens_per_step or 1.0) > COALESCED:
        raise MeasureError(
            f"no claim can be made: chunks carry {side.tokens_per_step:.2f} tokens, but the record says that there are "
            "no drafts; measure with --acceptance natural or synthetic:LENGTH, or turn off the joining of chunks"
        )
    what = "median step" if side.estimate == "gaps" else "mean step of the median request"
    decode = "request decodes" if running == 1 else "requests decode"
    text = (
        f"{what} {digits(side.step_ms)} ms (gaps between chunks while exactly {running} {decode} and none prefills, "
        f"{len(side.runs)} runs of medians {digits(min(side.runs))} to {digits(max(side.runs))} ms)"
    )
    drafts = record.protocol.acceptance != "none"
    if drafts and side.tokens_per_step is not None and side.per_token_ms is not None:
        text += f", {side.tokens_per_step:.2f} tokens per step, so {digits(side.per_token_ms)} ms per token"
    if result.step_ratio is None or result.baseline is None or record.baseline is None:
        return f"{text}."
    against = record.baseline.label or record.baseline.server or "the baseline"
    if "decode_backend=standard" in record.baseline.flags:
        against = "this engine's own NumPy path, which is no competitor"
    ratio = result.step_ratio
    return (
        f"{text}, against {digits(result.baseline.step_ms)} ms of {against} measured in turn with it: "
        f"{digits(ratio.value)}x (95 % interval {digits(ratio.low)} to {digits(ratio.high)})."
    )


def _step(record: StepRecord, running: int) -> str:
    found = [result for result in record.results if result.running_requests == running]
    if not found:
        raise MeasureError(_no_load(running, [r.running_requests for r in record.results]))
    result = found[0]
    cached = f"; {record.cache_note}" if record.cache_note else ""
    return (
        f"median of direct replay {digits(result.specialized_ms)} ms at context {result.context}, floor "
        f"{digits(result.floor_ms)} ms ({digits(result.bytes_per_step / 1e6)} MB at {digits(result.read_roof_gbps)} "
        f"GB/s read in the same run), {100 * result.fraction_of_roof:.0f} % of the roof{cached}."
    )


def _serve(record: ServeRecord, running: int) -> str:
    found = [point for point in record.points if point.concurrency == running]
    if not found:
        raise MeasureError(_no_load(running, [p.concurrency for p in record.points]))
    point = found[0]
    if point.interactivity is None or point.output_rate_per_chip is None or point.ttft_ms is None:
        raise MeasureError("no claim can be made: the source counts no tokens or holds no token times")
    failed = f", {point.failed + point.cancelled} requests failed" if point.failed + point.cancelled else ""
    return (
        f"{digits(point.interactivity.p90)} tokens/s per user (1 / P90 of TPOT), "
        f"{digits(point.output_rate_per_chip, 4)} output tokens/s per chip, median time to first token "
        f"{digits(point.ttft_ms.p50)} ms, {point.requests} requests{failed}."
    )


def _result(record: DecodeRecord, running: int) -> DecodeResult:
    for result in record.results:
        if result.running_requests == running:
            return result
    raise MeasureError(_no_load(running, [r.running_requests for r in record.results]))


def _no_load(running: int, there: list[int]) -> str:
    return f"the record has no load of {running} requests, it has {', '.join(map(str, there))}"


def _length(value: int | None) -> str:
    return "mixed" if value is None else str(value)
