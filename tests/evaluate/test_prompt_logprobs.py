"""Two servers compared through prompt log probabilities, against the KL of the whole distributions."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from stepkernel.evaluate.answers import Reply, ServerAsker
from stepkernel.evaluate.divergence import kl, log_softmax
from stepkernel.evaluate.prompt_logprobs import compare_servers, pooled_kl
from stepkernel.measure.errors import MeasureError
from support.openai_server import OpenAiServer, served

VOCAB = 40
TABLE = np.random.default_rng(0).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32)


def logs(noise: float):  # type: ignore[no-untyped-def]
    table = log_softmax(TABLE + np.random.default_rng(1).normal(0, noise, TABLE.shape).astype(np.float32))
    return lambda ids: table[np.array(ids)]


def server(log_probabilities):  # type: ignore[no-untyped-def]
    return served(OpenAiServer(lambda prompt, most: Reply("", False), log_probabilities))


def test_two_servers() -> None:
    sequences: Sequence[Sequence[int]] = np.random.default_rng(2).integers(0, VOCAB, (3, 30)).tolist()
    before, after = logs(0.0), logs(0.1)
    with server(before) as a, server(after) as b, ServerAsker(b) as one, ServerAsker(a) as other:
        found, positions, samples = compare_servers(one, other, sequences, top=VOCAB)
        part, *_ = compare_servers(one, other, sequences, top=5)
        same, *_ = compare_servers(other, other, sequences, top=5)
    inputs = [ids[:-1] for ids in sequences]
    exact = np.stack([kl(before(ids), after(ids)) for ids in inputs])
    assert found.mean_kl == pytest.approx(exact.mean(), rel=1e-6)
    np.testing.assert_allclose(positions, exact.mean(axis=0), rtol=1e-6)
    assert len(samples) == found.positions == 87
    losses = [-before(ids[:-1])[i, ids[i + 1]] for ids in sequences for i in range(29)]
    assert found.baseline_perplexity == pytest.approx(math.exp(np.mean(losses)))
    expected = np.mean([before(ids).argmax(1) == after(ids).argmax(1) for ids in inputs])
    assert found.top1_agreement == pytest.approx(expected)
    assert 0 < part.mean_kl < found.mean_kl
    assert part.covered < found.covered
    assert (same.mean_kl, same.top1_agreement) == (0.0, 1.0)


def test_pooling_never_exceeds_the_kl() -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        p, q = (log_softmax(random.normal(0, 3, (1, 12)).astype(np.float32))[0] for _ in range(2))
        tops = [{str(i): float(x[i]) for i in np.argsort(-x)[:4]} for x in (p, q)]
        assert pooled_kl(*tops)[0] <= kl(p[None], q[None])[0] + 1e-12


def test_a_server_without_prompt_logprobs_is_refused() -> None:
    with server(None) as address, ServerAsker(address) as one, pytest.raises(MeasureError, match="HTTP 400"):
        compare_servers(one, one, [[1, 2, 3]])
    broken = OpenAiServer(lambda prompt, most: Reply("", False))
    broken._echo = lambda body: (200, {"choices": [{"logprobs": None}]})  # type: ignore[method-assign]
    with served(broken) as address, ServerAsker(address) as one, pytest.raises(MeasureError, match="echo"):
        compare_servers(one, one, [[1, 2, 3]])
