"""How far two distributions over the next token are apart, in float64 whatever the logits came in."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    """float64 log probabilities of rows of logits; a row with a NaN or infinite logit becomes NaN."""
    values: Floats = logits.astype(np.float64)
    values[~np.isfinite(values).all(axis=-1)] = np.nan
    values -= values.max(axis=-1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=-1, keepdims=True))
    return values


def kl(baseline: Floats, candidate: Floats) -> Floats:
    """KL(baseline || candidate) in nats of rows of log probabilities; never below 0."""
    found: Floats = np.sum(np.exp(baseline) * (baseline - candidate), axis=-1)
    return np.maximum(found, 0.0)


@dataclass(frozen=True)
class Divergence:
    """Figures over compared positions. KL in nats, baseline as the truth; perplexity exp(mean loss) of the true tokens.

    positions        compared rows; broken: rows in which a side holds a NaN or infinity, in no other figure
    top1_agreement   share of rows in which both sides rank the same token first (the lower id among equals)
    """

    positions: int
    broken: int
    mean_kl: float
    median_kl: float
    p999_kl: float
    max_kl: float
    top1_agreement: float
    perplexity: float
    baseline_perplexity: float


@dataclass
class Comparison:
    """Collects rows of two sides, position after position."""

    divergences: list[Floats] = field(default_factory=list)
    same: list[NDArray[np.bool_]] = field(default_factory=list)
    losses: list[Floats] = field(default_factory=list)
    baseline_losses: list[Floats] = field(default_factory=list)

    def add(self, baseline: Floats, candidate: Floats, targets: NDArray[np.int64]) -> None:
        """Log probabilities [rows, vocab] of one position of every sequence, and the tokens that followed."""
        rows = np.arange(len(targets))
        self.divergences.append(kl(baseline, candidate))
        self.same.append(baseline.argmax(axis=-1) == candidate.argmax(axis=-1))
        self.losses.append(-candidate[rows, targets])
        self.baseline_losses.append(-baseline[rows, targets])

    def by_position(self) -> list[float]:
        """Mean KL over the sequences at each position; 0 where every row is broken."""
        return [float(np.mean(kept)) if (kept := x[np.isfinite(x)]).size else 0.0 for x in self.divergences]

    def samples(self) -> Floats:
        """KL of every row that is not broken."""
        found = np.concatenate(self.divergences)
        return found[np.isfinite(found)]

    def figures(self) -> Divergence:
        """Raises ValueError if nothing can be compared."""
        values, same = np.concatenate(self.divergences), np.concatenate(self.same)
        whole = np.isfinite(values)
        if not whole.any():
            raise ValueError(f"all {len(values)} compared rows hold NaN or infinity; there is nothing to compare")
        kept = values[whole]
        losses, baseline = np.concatenate(self.losses)[whole], np.concatenate(self.baseline_losses)[whole]
        return Divergence(
            positions=len(values),
            broken=int(np.count_nonzero(~whole)),
            mean_kl=float(kept.mean()),
            median_kl=float(np.median(kept)),
            p999_kl=float(np.quantile(kept, 0.999)),
            max_kl=float(kept.max()),
            top1_agreement=float(same[whole].mean()),
            perplexity=float(np.exp(losses.mean())),
            baseline_perplexity=float(np.exp(baseline.mean())),
        )
