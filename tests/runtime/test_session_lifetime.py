"""Sessions that are closed or broken off, and prompts that are none."""

from collections.abc import Callable

import pytest

from stepkernel.program.inputs import StepInputs, StepOutputs
from stepkernel.runtime.sampling import RequestError
from stepkernel.runtime.sequence import StopRules
from stepkernel.runtime.session import Session

Open = Callable[..., Session]
SHORT = StopRules(max_tokens=4, ignore_eos=True)


def test_closed_session_refuses(open_session: Open) -> None:
    session = open_session()
    session.add([2040, 5], rules=SHORT)
    session.close()
    for use in (session.step, lambda: list(session.stream()), lambda: session.add([2040])):
        with pytest.raises(RequestError, match="the session is closed"):
            use()
    session.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_step_broken_off_drops_its_requests(
    open_session: Open, monkeypatch: pytest.MonkeyPatch, phase: str, error: type[BaseException]
) -> None:
    """The states have advanced when the error comes, so going on with these requests would give wrong tokens."""
    session = open_session(max_requests=2)
    expected = session.generate([[2040, 5, 6]], rules=SHORT)[0].token_ids
    for _ in range(3):
        session.add([2040, 5, 6], rules=SHORT)
    with monkeypatch.context() as patch:
        real = getattr(session.engine, phase)

        def run_and_fail(inputs: StepInputs, *others: bool) -> StepOutputs:
            real(inputs, *others)
            raise error

        patch.setattr(session.engine, phase, run_and_fail)
        with pytest.raises(error):
            session.step()
    assert session.slots.free == session.slots.capacity
    assert session.pages.free == session.pages.capacity
    assert not session.active
    results = [event.result for event in session.stream() if event.result is not None]
    assert [r.token_ids for r in results] == [expected]
    assert session.generate([[2040, 5, 6]], rules=SHORT)[0].token_ids == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([2040, 1.5], "prompt token id 1.5: expected a whole number"),
        (["5"], "prompt token id '5': expected a whole number"),
        ("a\udcff", "no text in this locale at character 1"),
    ],
)
def test_prompts_of_another_type(open_session: Open, prompt: object, message: str) -> None:
    session = open_session()
    with pytest.raises(RequestError, match=message):
        session.add(prompt)  # type: ignore[arg-type]
    assert not session.busy
