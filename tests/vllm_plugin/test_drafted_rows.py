"""What the plugin computes in place of vLLM for rounds with and without drafts, and rows that wait for the draft."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.sample.rejection_sampler import rejection_sample
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from stepkernel.runtime.draft_length import FIRST_LOOK, DraftLength
from stepkernel.vllm_plugin import drafting
from stepkernel.vllm_plugin.aligned import AlignedStates
from stepkernel.vllm_plugin.batch import PageBatch, StateBatch
from stepkernel.vllm_plugin.certain import SeenStep, Waiting
from stepkernel.vllm_plugin.drafting import Drafting
from stepkernel.vllm_plugin.sampler import accepted
from stepkernel.vllm_plugin.undrafted import DraftRows
from support.vllm import Engine, Engines

pytestmark = pytest.mark.vllm
VOCAB = 5
GREEDY: Any = SimpleNamespace(all_greedy=True, all_random=False, generators={})


def guessing(engines: Engines) -> Engine:
    config = {"method": "custom_class", "model": "support.oracle.Oracle", "num_speculative_tokens": 3}
    return engines.get("tiny-k3", speculative_config=config)


def test_greedy_acceptance_is_vllms(engines: Engines) -> None:
    guessing(engines)  # starting, it replaces vLLM's kernels by those for a CPU
    rng = np.random.default_rng(7)
    for _ in range(200):
        counts = rng.integers(0, 5, rng.integers(1, 6)).tolist()
        drafts = [rng.integers(-1, VOCAB, n).tolist() for n in counts]
        metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
        largest = [rng.integers(0, VOCAB, n + 1) for n in counts]
        # Half of the drafts are right.
        for row, guesses in zip(largest, drafts, strict=True):
            right = rng.random(len(guesses)) < 0.5
            row[:-1] = np.where(right, np.maximum(guesses, 0), row[:-1])
        before_last = torch.tensor(np.concatenate([row[:-1] for row in largest]), dtype=torch.int64)
        logits = torch.nn.functional.one_hot(before_last, VOCAB).float()
        last = torch.tensor([[row[-1]] for row in largest], dtype=torch.int32)
        wanted = rejection_sample(
            metadata.draft_token_ids,
            counts,
            metadata.max_spec_len,
            metadata.cu_num_draft_tokens,
            None,
            logits,
            last,
            GREEDY,
        )
        found = accepted(torch.tensor(np.concatenate(largest), dtype=torch.int32), metadata)
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted.tolist()


def test_rows_of_a_step_without_drafts_are_vllms(engines: Engines) -> None:
    engine = guessing(engines)

    def compare(worker: Any) -> int:
        short = worker.model_runner._calc_spec_decode_metadata
        assert isinstance(short, DraftRows)
        compared = 0
        for drafts in ([0, 0, 0], [2, 0, 1], [0, 0, 0], [0], [3], [0], [0, 0, 0]):
            sizes = 1 + np.array(drafts, np.int32)
            sizes[0] += 1  # a prompt's last piece gives logits of its last row alone
            given = np.array(drafts, np.int32), np.cumsum(sizes, dtype=np.int32)
            found, wanted = short(*given), short._calculate(*given)
            for name, value in vars(wanted).items():
                if isinstance(value, torch.Tensor):
                    assert getattr(found, name).dtype == value.dtype, name
                    assert torch.equal(getattr(found, name), value), name
                else:
                    assert getattr(found, name) == value, name
                compared += 1
        return compared

    assert engine.llm.collective_rpc(compare)[0] > 7 * 5


@pytest.mark.quick
def test_rounds_at_rest_end_when_it_is_time_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 5 ms; a trial that may cost 1.5 ms is within 1.5 % of the time after 20 of them, and the look behind
    that begins it. All drafts are rejected, and the bound holds."""
    now = [0.0]
    monkeypatch.setattr(drafting, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    drafter = Drafting.__new__(Drafting)
    drafter.lengths = DraftLength(3)
    drafter.lengths.extra = {1: {1: 1e-3, 3: 2e-3}}
    drafter._began, drafter._rest, drafter._resting, drafter._rested = None, 0, 0, []
    chosen = [0]
    for length in range(20, 400):
        drafts = chosen[-1]
        now[0] += 5e-3 + 1e-3 * drafts
        seen = step([length + drafts], [1 + drafts], True, [7])
        chosen.append(drafter._choose(seen, [[5]], True))
    trials = [i for i, drafts in enumerate(chosen) if drafts]
    assert 20 <= trials[0] <= 20 + FIRST_LOOK + 2
    assert len(trials) >= 2
    assert sum(chosen) * 1e-3 <= 0.016 * now[0]
    assert sum(drafter.lengths.rounds) + len(drafter._rested) == 379


@pytest.mark.quick
def test_a_step_that_fills_a_block_goes_vllms_way() -> None:
    """Requests behind the last one may hold anything."""
    for computed, scheduled, inside in (([5, 8], [1, 1], True), ([5, 7], [1, 1], False), ([0, 4], [8, 1], False)):
        buffers = (SimpleNamespace(np=np.array([*row, 8 - i])) for i, row in enumerate((computed, scheduled)))
        states: Any = SimpleNamespace(block_size=8)
        states.num_computed_tokens_buf, states.num_scheduled_tokens_buf = buffers
        assert AlignedStates.fills_no_block(states, 2) == inside


def step(lengths: list[int], sizes: list[int], verifies: bool, first_pages: list[int]) -> SeenStep:
    """Row i of its taps holds i everywhere; row i goes to slot 100 i."""
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    requests, rows = len(sizes), starts[-1]
    table = torch.tensor([[page, 0] for page in first_pages], dtype=torch.int32)
    states = StateBatch(
        starts, table, [False] * requests, [1] * requests, [verifies] * requests, torch.zeros(requests, 1)
    )
    pages = PageBatch(starts, lengths, table, torch.arange(rows) * 100)
    return SeenStep(np.arange(rows, dtype=np.float32)[:, None].repeat(4, 1), states, pages)


@pytest.mark.quick
def test_certain_rows_wait_until_others_come() -> None:
    waiting = Waiting()
    assert waiting.take().rows == 0
    seen = step([12, 33], [3, 3], True, [7, 9])
    certain = seen.certain([[5, 6], [4]])  # one accepted draft, and none
    assert [(rows.begin, rows.end, rows.row) for rows in certain] == [(9, 11, 0), (30, 31, 3)]
    assert waiting.continues(certain)
    waiting.add(certain, seen)
    seen.taps[...] = np.nan  # the next step's
    following = step([12, 32], [1, 1], True, [7, 9])
    plain = following.certain([[1], [1]])
    assert waiting.continues(plain)
    waiting.add(plain, following)
    assert waiting.rows == 5
    for others in (
        step([13, 33], [1, 1], True, [7, 8]),  # another request
        step([13], [1], True, [7]),  # one has ended
        step([1, 33], [1, 1], True, [7, 9]),  # one began anew in the same page
        step([33, 13], [1, 1], True, [9, 7]),  # another order
    ):
        assert not waiting.continues(others.certain([[1]] * others.pages.requests))
    context = waiting.take()
    assert context.positions.tolist() == [9, 10, 30, 11, 31]
    assert context.slot_mapping.tolist() == [0, 100, 300, 0, 100]
    assert context.taps[:, 0].tolist() == [0, 1, 3, 0, 1]
    assert waiting.rows == 0
    prompt = step([40], [8], False, [3])
    (rows,) = prompt.certain([[]])
    assert (rows.begin, rows.end) == (32, 40)
