"""Is what an engine serves what the learner made? Two versions compared at fixed probe positions.

With e = engine(version) - engine(reference) and d = learner(version) - learner(reference), over the tokens that all
four top lists hold, score = <e, d> / <d, d>: 1 where the engine serves the version, 0 where it still serves the
reference, 2 where it applies the adapter twice. Closeness of the log-probs themselves would say less: bf16 noise
(0.035 nats on average) exceeds one small step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt

import numpy as np

Reading = Mapping[int, float]
"""One probe position: log-probs (nats, T = 1) of the most likely tokens."""

ACCEPTED = (0.5, 1.5)
"""Open interval of scores that show the version to be served."""
NOISE_SAMPLES = 50
"""So many real versions measure a replica's noise; until then the canary records and alarms, and rejects nothing."""
NOISE_QUANTILE = 0.9
SURE_AT = 3.0
"""A version is failed only where |d| is this many times the noise. One canary's noise is no sum of independent errors:
rounding goes along with d, and versions that were served well scored -0.7 to 0.48 at 1 to 2.1 times the noise. Noise
that lies wholly along d moves a score by noise / |d|: here it would have to be one and a half times its quantile."""


class Verdict(StrEnum):
    VERIFIED = "verified"
    INDISTINGUISHABLE = "indistinguishable"
    """The step is smaller than the noise: accepted, and shown."""
    UNCHECKED = "unchecked"
    """Version 0, or a version without probes: nothing to compare with."""
    FAILED = "failed"


@dataclass(frozen=True)
class Comparison:
    score: float | None
    """<e, d> / <d, d>; None where d is zero."""
    distance: float
    """|d|, nats."""
    residual: float
    """|e - d| / sqrt(tokens), nats: what separates engine and learner, per token."""
    tokens: int

    def in_words(self) -> str:
        return (
            f"the canary's score is {self.score or 0.0:.2f} (1 = the version is served, 0 = the reference still is) "
            f"at a distance of {self.distance:.3f} nats over {self.tokens} tokens"
        )


def compare(
    engine_version: Sequence[Reading],
    engine_reference: Sequence[Reading],
    learner_version: Sequence[Reading],
    learner_reference: Sequence[Reading],
) -> Comparison:
    """Compare at the same probe positions, in the same order.

    Where engine and learner share no token at all (a broken adapter can do that), d is taken over the tokens that the
    learner's two lists share and the score is 0.
    """
    e: list[float] = []
    d: list[float] = []
    learner_only: list[float] = []
    for ev, er, lv, lr in zip(engine_version, engine_reference, learner_version, learner_reference, strict=True):
        for token in sorted(lv.keys() & lr.keys()):
            learner_only.append(lv[token] - lr[token])
            if token in ev and token in er:
                e.append(ev[token] - er[token])
                d.append(lv[token] - lr[token])
    if not d:
        distance = float(np.linalg.norm(learner_only))
        return Comparison(0.0 if distance > 0 else None, distance, distance / sqrt(len(learner_only) or 1), 0)
    engine, learner = np.array(e), np.array(d)
    square = float(learner @ learner)
    return Comparison(
        score=float(engine @ learner) / square if square > 0 else None,
        distance=sqrt(square),
        residual=float(np.linalg.norm(engine - learner)) / sqrt(len(d)),
        tokens=len(d),
    )


def judge(comparison: Comparison, noise: Sequence[float]) -> Verdict:
    """The verdict, given the residuals of the replica's earlier versions (nats per token)."""
    if comparison.score is None:
        return Verdict.INDISTINGUISHABLE
    if ACCEPTED[0] < comparison.score < ACCEPTED[1]:
        return Verdict.VERIFIED
    level = float(np.quantile(noise, NOISE_QUANTILE)) if noise else 0.0
    if comparison.distance <= SURE_AT * level * sqrt(comparison.tokens):
        return Verdict.INDISTINGUISHABLE
    return Verdict.FAILED


def rejects(verdict: Verdict, noise: Sequence[float]) -> bool:
    """Whether the verdict fails the deployment, or only alarms."""
    return verdict is Verdict.FAILED and len(noise) >= NOISE_SAMPLES


def with_sample(noise: Sequence[float], comparison: Comparison, verdict: Verdict) -> list[float]:
    """The replica's noise figures after this version; a failed one measures the failure, not the noise."""
    if verdict not in (Verdict.VERIFIED, Verdict.INDISTINGUISHABLE) or comparison.tokens == 0:
        return list(noise)
    return [*noise, comparison.residual][-NOISE_SAMPLES:]
