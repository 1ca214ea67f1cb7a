"""Tensor-parallel ranks as processes: the same numbers, any pace, and an end in time whatever happens to one of them.

Every process ends itself at a deadline, so a hang is a failure and not a stuck test run.
"""

import re
import signal
import time

import numpy as np
import pytest

from support.cpu import CpuModel
from support.golden import prompts
from support.group import Processes

PACES = [("tiny-kimi-linear", 2, 2000), ("tiny-k3", 2, 300), ("small", 4, 300)]
PROMPT = "[3, 7, 11, 60, 41]"


def test_greedy_text(k3: CpuModel) -> None:
    """The text of the trained model in float32, and the logits of one rank."""
    wanted = prompts("tiny-k3")[1]
    code = f"""
engine = named_rank(path, "tiny-k3", Shard(rank, size), mode="float32", batch=1)
request = engine.admit()
logits = engine.prefill(request, {wanted["prompt_ids"].tolist()})
text, rows = [], []
for _ in range(32):
    text.append(int(logits.argmax()))
    rows.append(logits.tolist())
    logits = engine.decode([request], text[-1:])[0]
say([text, rows])
"""
    with Processes(code) as ranks:
        (text, rows), other = ranks.results()
    assert [text, rows] == other
    assert text == wanted["greedy_tokens"].tolist()
    one = k3.engine("float32", batch=1)
    request = one.admit()
    logits = one.prefill(request, wanted["prompt_ids"].tolist())
    for token, row in zip(text, rows, strict=True):
        assert np.linalg.norm(row - logits) < 1e-4 * np.linalg.norm(logits)
        logits = one.decode([request], [token])[0]


@pytest.mark.parametrize(("name", "size", "steps"), PACES)
def test_many_steps_at_any_pace(name: str, size: int, steps: int) -> None:
    """Teams of changing sizes, more threads than processors, ranks that fall behind: always the same bits."""
    code = f"""
engine = named_rank(path, "{name}", Shard(rank, size), batch=3, threads=2)
class Sizes:
    def choose(self, kind): return int(pace.integers(1, 3))
    def record(self, *_): pass
pace, order = np.random.default_rng(rank), np.random.default_rng(7)
requests = [engine.admit(pages=4) for _ in range(3)]
for request in requests: engine.prefill(request, {PROMPT})
executor = engine.executor()
executor.team_size = Sizes()
state = [*engine.caches.recurrent, *engine.caches.conv]
kept = [array.copy() for array in state]
wanted = {{}}
for step in range({steps}):
    for array, old in zip(state, kept): array[...] = old
    count = int(order.integers(1, 4))
    tokens = [[5]] * count
    logits = executor.run(engine.inputs(requests[:count], tokens)).logits[0].copy()
    assert np.array_equal(logits, wanted.setdefault(0, logits)), step
    if pace.random() < 0.02: time.sleep(pace.random() * 0.02)
say([engine.mailbox.exchanges, logits.astype(float).tolist()])
"""
    with Processes(_any_size(code, size), size) as ranks:
        first, *others = ranks.results()
    assert np.isfinite(first[1]).all()
    assert all(other == first for other in others)


STEPPING = """
engine = named_rank(path, "tiny-k3", Shard(rank, size), batch=1, threads=2, timeout=TIMEOUT)
request = engine.admit()
inputs = engine.inputs([request], [[5]])
for _ in range(20): engine.run(inputs)
say("steps")
messages, started = [], time.monotonic()
try:
    while time.monotonic() - started < 100: engine.run(inputs)
except GroupError as error:
    messages.append(str(error))
for again in (lambda: engine.run(inputs), lambda: engine.executor().run_stage(0, inputs)):
    try:
        again()
    except GroupError as error:
        messages.append(str(error))
say([messages, threading.active_count()])
engine.close()
engine.mailbox.close()
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stands_still(number: signal.Signals, size: int) -> None:
    """All others end with the same clear error within seconds, and stay ended; a rank that wakes up later ends too."""
    with Processes(_any_size(STEPPING.replace("TIMEOUT", "2"), size), size) as ranks:
        for rank in range(size):
            assert ranks.read(rank) == "steps"
        ranks.signal(size - 1, number)
        started = time.monotonic()
        found = [ranks.read(rank) for rank in range(size - 1)]
        # Two seconds of waiting; other work of the machine and pauses of its processes make it longer.
        assert time.monotonic() - started < 60
        for messages, _ in found:
            assert len(messages) == 3
            assert messages[0] == messages[1] == messages[2] == found[0][0][0]
            assert f"rank {size - 1} did not answer rank" in messages[0]
            assert "within 2 s in " in messages[0]
        if number == signal.SIGSTOP:
            ranks.signal(size - 1, signal.SIGCONT)
            messages, _ = ranks.read(size - 1)
            assert messages == found[0][0]
            ranks.results()


def test_a_rank_that_raises_or_leaves() -> None:
    """A rank that ends in good order, or by an error of Python, ends the others at once."""
    code = """
def leave():
    if rank == 1:
        say("left")
        sys.exit(0)
""" + STEPPING.replace("TIMEOUT", "90").replace('say("steps")', "leave()")
    with Processes(_any_size(code, 2)) as ranks:
        assert ranks.read(1) == "left"
        messages, _ = ranks.read(0)
    assert messages == ["tensor-parallel group of 2: rank 1 has left; all ranks stop, restart them together"] * 3


def test_ranks_out_of_step() -> None:
    """Other tokens on one rank would give wrong numbers on all: both notice in that step."""
    code = STEPPING.replace("TIMEOUT", "90").replace(
        'say("steps")', "say('steps')\nif rank == 1: inputs = engine.inputs([request], [[6]])"
    )
    with Processes(_any_size(code, 2)) as ranks:
        for rank in (0, 1):
            assert ranks.read(rank) == "steps"
        found = [ranks.read(rank)[0] for rank in (0, 1)]
    assert found[0] == found[1]
    assert "runs another step than rank" in found[0][0]


def test_a_rank_that_never_comes() -> None:
    code = """
from support import group
group.PATIENCE = 2.0
engine = named_rank(path, "tiny-kimi-linear", Shard(rank, 2), batch=1)
request = engine.admit()
try:
    engine.decode([request], [5])
except GroupError as error:
    say(str(error))
engine.mailbox.close()
"""
    with Processes(code, 1) as ranks:
        (message,) = ranks.results()
        assert not ranks.path.exists()
    assert message == "tensor-parallel group of 2: ranks [1] did not start within 2 s of rank 0"


def _any_size(code: str, size: int) -> str:
    """tiny-k3 divides by two; more ranks take a small random model."""
    if size == 2:
        return code
    model = """
from stepkernel.cpu.weights import pack_weights
from stepkernel.model.presets import preset
from stepkernel.program.builder import build_program
from support.group import rank_engine
from support.random_weights import RandomWeights
from dataclasses import replace
config = preset("tiny-kimi-linear")
config = replace(config, num_layers=2, kda_layers=(0,), mla_layers=(1,), num_heads=size, vocab_size=24 * size,
    linear_attention=replace(config.linear_attention, num_heads=size), num_experts=6 * size,
    intermediate_size=64 * size, moe_intermediate_size=32 * size, bos_token_id=0, eos_token_ids=(1,), pad_token_id=2)
weights = RandomWeights(config, shard=Shard(rank, size))
packed = pack_weights(build_program(config, weights.shard), weights)
"""
    named = re.compile(r'named_rank\(path, "[^"]*", Shard\(rank, size\)')
    return model + named.sub("rank_engine(path, config, weights, packed", code)
