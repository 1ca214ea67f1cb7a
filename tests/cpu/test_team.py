"""The thread team: it never hangs, ends when it should, and leaves no trace. Each in a process with a deadline."""

import pytest

from support.process import run

SETUP = """
import numpy as np
from support.cpu import CpuModel, _checkpoint

def engine(threads, name="tiny-kimi-linear", batch=2):
    made = CpuModel(name, *_checkpoint(name), []).engine(batch=batch, threads=threads)
    requests = [made.admit(pages=4) for _ in range(batch)]
    for i, request in enumerate(requests):
        made.prefill(request, [3 + i, 7, 11])
    return made, made.inputs(requests, [[5]] * batch)

def workers():
    return sum(t.name.startswith("stepkernel-") for t in threading.enumerate())

class Sizes:
    def __init__(self, sizes):
        self.sizes, self.step = sizes, 0
    def choose(self, kind):
        self.step += 1
        return self.sizes[self.step % len(self.sizes)]
    def record(self, threads, nanoseconds):
        pass
"""


@pytest.mark.parametrize(
    ("threads", "sizes", "steps"),
    [(1, [1], 400), (2, [2], 800), (2, [1, 2], 2000), (3, [3, 1, 2], 400), (4, [4], 200), (4, [1, 4, 2, 3], 400)],
)
def test_many_steps(threads: int, sizes: list[int], steps: int) -> None:
    """More threads than processors, and another team size in every step: no hang, always the same bits. Pauses let the
    workers fall asleep between steps."""
    code = f"""
made, inputs = engine({threads})
executor = made.executor()
executor.team_size = Sizes({sizes})
state = [*made.caches.recurrent, *made.caches.conv]
kept = [a.copy() for a in state]
wanted = None
for step in range({steps}):
    for a, b in zip(state, kept):
        a[...] = b
    logits = executor.run(inputs).logits
    wanted = logits.copy() if wanted is None else wanted
    assert np.array_equal(logits, wanted), step
    if step % 100 == 0:
        time.sleep(0.003)
executor.close()
print(json.dumps(workers()))
"""
    assert run(SETUP + code) == 0


def test_close() -> None:
    code = """
before = workers()
made, inputs = engine(3)
executor = made.executor()
running = workers() - before
executor.close()
after = workers()
executor.close()
errors = []
for call in (lambda: executor.run(inputs), lambda: executor.run_stage(0, inputs)):
    try:
        call()
    except ValueError as error:
        errors.append(str(error))
print(json.dumps([before, running, after, errors]))
"""
    assert run(SETUP + code) == [0, 2, 0, ["the executor is closed"] * 2]


def test_a_forked_child_is_refused() -> None:
    """It would wait for threads that were not forked with it; the parent goes on."""
    code = """
import os
made, inputs = engine(2)
executor = made.executor()
executor.run(inputs)
reader, writer = os.pipe()
if os.fork() == 0:
    try:
        executor.run(inputs)
    except ValueError as error:
        os.write(writer, str(error).encode())
    executor.close()
    os._exit(0)
os.close(writer)
said = os.read(reader, 1000).decode()
os.wait()
executor.run(inputs)
print(json.dumps(said))
"""
    assert run(SETUP + code) == "this process was forked from the executor's and has none of its threads; fork first"


def test_close_before_the_first_step_and_while_workers_sleep() -> None:
    code = """
from stepkernel.cpu.executor import CpuExecutor
made, inputs = engine(1)
program = made.executor().program
for pause in (0, 0, 0.002, 0.02, 0.2):
    executor = CpuExecutor(program, made.packed, made.caches, threads=4)
    time.sleep(pause)
    executor.close()
    executor = CpuExecutor(program, made.packed, made.caches, threads=4)
    executor.run(inputs)
    time.sleep(pause)
    executor.close()
print(json.dumps(workers()))
"""
    assert run(SETUP + code) == 0


def test_garbage_collection_ends_the_team() -> None:
    code = """
made, inputs = engine(4)
made.run(inputs)
running = workers()
del made
gc.collect()
print(json.dumps([running, workers()]))
"""
    assert run(SETUP + code) == [3, 0]


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "import os; time.sleep(0.05); sys.exit(0)"])
def test_a_process_ends_with_a_live_executor(end: str) -> None:
    code = f"""
made, inputs = engine(4)
made.run(inputs)
print(json.dumps(workers()), flush=True)
{end}
"""
    assert run(SETUP + code, timeout=60) == 3


def test_an_error_ends_the_process_too() -> None:
    code = """
made, inputs = engine(3)
made.run(inputs)
raise RuntimeError("the user's own fault")
"""
    with pytest.raises(AssertionError, match="the user's own fault"):
        run(SETUP + code, timeout=60)


def test_two_executors_in_turn_and_side_by_side() -> None:
    """Buffers, scratch and teams are an executor's own, also when two Python threads drive them at once."""
    code = """
pairs = [engine(2), engine(2, "tiny-k3", 3)]
def state(made):
    return [*made.caches.recurrent, *made.caches.conv]
kept = [[a.copy() for a in state(made)] for made, _ in pairs]
def step(i):
    made, inputs = pairs[i]
    for a, b in zip(state(made), kept[i]):
        a[...] = b
    return made.run(inputs).logits.copy()
wanted = [step(0), step(1)]
for _ in range(100):
    for i in (0, 1):
        assert np.array_equal(step(i), wanted[i])
wrong = []
def drive(i):
    for _ in range(200):
        if not np.array_equal(step(i), wanted[i]):
            wrong.append(i)
threads = [threading.Thread(target=drive, args=(i,)) for i in (0, 1)]
for t in threads: t.start()
for t in threads: t.join()
for made, _ in pairs: made.close()
print(json.dumps([wrong, workers()]))
"""
    assert run(SETUP + code) == [[], 0]


def test_the_interpreter_runs_on_during_a_step() -> None:
    """The lock of Python is free inside a step: another thread runs though this one never has to yield."""
    code = """
made, inputs = engine(2)
count, stop = 0, False
def work():
    global count
    while not stop:
        count += 1
        time.sleep(0)
thread = threading.Thread(target=work)
made.run(inputs)
sys.setswitchinterval(1000)
thread.start()
before = count
for _ in range(200):
    made.run(inputs)
found = count - before
stop = True
thread.join()
print(json.dumps(found))
"""
    assert run(SETUP + code) > 100


def test_steps_do_not_grow_memory() -> None:
    """A leak of one page (4 KiB) in each step would be 4 MB."""
    code = """
import psutil
made, inputs = engine(2, "tiny-k3")
for _ in range(200):
    made.run(inputs)
gc.collect()
before = psutil.Process().memory_info().rss
for _ in range(1000):
    made.run(inputs)
gc.collect()
print(json.dumps(psutil.Process().memory_info().rss - before))
"""
    assert run(SETUP + code) < 1 << 20


def test_executors_do_not_grow_memory() -> None:
    code = """
import psutil
from stepkernel.cpu.executor import CpuExecutor
made, inputs = engine(1, "tiny-k3")
program = made.executor().program
def cycle():
    executor = CpuExecutor(program, made.packed, made.caches, threads=3)
    executor.run(inputs)
    executor.close()
for _ in range(10):
    cycle()
gc.collect()
before = psutil.Process().memory_info().rss
for _ in range(50):
    cycle()
gc.collect()
print(json.dumps(psutil.Process().memory_info().rss - before))
"""
    # One executor's buffers take more than 1 MB.
    assert run(SETUP + code) < 8 << 20


def test_the_callers_floating_point_mode_is_unchanged() -> None:
    """Steps flush denormal numbers; the caller's arithmetic keeps them."""
    code = """
def denormal():
    return float(np.float32(1e-38) * np.float32(0.01) + np.float32(1e-45)), float(np.float32(3e-45) / np.float32(2))
before = denormal()
made, inputs = engine(2)
for _ in range(3):
    made.run(inputs)
    made.executor().run_stage(1, inputs)
during = denormal()
made.close()
print(json.dumps([before, during, denormal()]))
"""
    before, during, after = run(SETUP + code)
    assert before == during == after
    assert all(value > 0 for value in before)
