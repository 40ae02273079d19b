"""The canary's score and verdicts, by hand."""

import math

import pytest

from app.policies.canary import NOISE_SAMPLES, Comparison, Verdict, compare, judge, rejects, with_sample


def test_the_score_of_a_served_version_by_hand() -> None:
    learner_reference = [{1: -1.0, 2: -2.0}]
    learner_version = [{1: -0.7, 2: -2.4}]  # d = (0.3, -0.4), |d| = 0.5
    engine_reference = [{1: -1.1, 2: -2.0}]
    engine_version = [{1: -0.8, 2: -2.5}]  # e = (0.3, -0.5): <e, d> = 0.09 + 0.2 = 0.29; <d, d> = 0.25
    found = compare(engine_version, engine_reference, learner_version, learner_reference)
    assert found.score == pytest.approx(0.29 / 0.25)
    assert found.distance == pytest.approx(0.5)
    assert found.residual == pytest.approx(0.1 / math.sqrt(2))  # e - d = (0, -0.1) over two tokens
    assert found.tokens == 2


def test_only_tokens_in_all_four_lists_count() -> None:
    found = compare(
        [{1: -0.5, 2: -9.0, 3: -3.0}],
        [{1: -1.0, 3: -1.0, 4: -1.0}],
        [{1: -0.5, 2: -1.0, 4: -5.0}],
        [{1: -1.0, 2: -5.0, 3: -1.0}],
    )
    assert (found.score, found.distance, found.tokens) == (pytest.approx(1.0), pytest.approx(0.5), 1)


def test_positions_add_up() -> None:
    position = ({1: -0.5}, {1: -1.0}, {1: -0.5}, {1: -1.0})
    columns = [[part, part] for part in position]
    assert compare(*columns).distance == pytest.approx(math.sqrt(0.5))


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        compare([{1: 0.0}], [{1: 0.0}], [{1: 0.0}, {1: 0.0}], [{1: 0.0}])


def test_an_engine_that_shares_no_token_with_the_learner_scores_zero() -> None:
    found = compare([{9: -0.1}], [{1: -1.0}], [{1: -0.5}], [{1: -1.0}])
    assert (found.score, found.distance, found.tokens) == (0.0, pytest.approx(0.5), 0)
    assert judge(found, [1.0] * NOISE_SAMPLES) is Verdict.FAILED


def test_a_version_equal_to_its_reference_is_indistinguishable() -> None:
    found = compare([{1: -1.0}], [{1: -1.0}], [{1: -1.0}], [{1: -1.0}])
    assert found.score is None
    assert judge(found, []) is Verdict.INDISTINGUISHABLE


def comparison(score: float, distance: float = 1.0) -> Comparison:
    return Comparison(score=score, distance=distance, residual=0.05, tokens=100)


@pytest.mark.parametrize(
    ("score", "distance", "verdict"),
    [
        (1.0, 1.6, Verdict.VERIFIED),
        (0.51, 1.6, Verdict.VERIFIED),
        (0.5, 1.6, Verdict.FAILED),  # the bound itself is not above it
        (0.0, 1.6, Verdict.FAILED),  # the reference is still served
        (2.0, 1.6, Verdict.FAILED),  # applied twice
        (0.0, 1.49, Verdict.INDISTINGUISHABLE),  # noise of 0.05 a token over 100 tokens is 0.5 nats, three times 1.5
        (2.0, 1.49, Verdict.INDISTINGUISHABLE),
        (1.0, 0.01, Verdict.VERIFIED),
    ],
)
def test_verdicts_against_a_measured_noise(score: float, distance: float, verdict: Verdict) -> None:
    assert judge(comparison(score, distance), [0.05] * NOISE_SAMPLES) is verdict


@pytest.mark.parametrize(
    ("noise", "score", "distance"),
    [
        (0.26, 0.02, 3.62),
        (0.26, 0.47, 3.11),
        (0.341, 0.45, 5.90),
        (0.341, -0.02, 4.34),
        (0.341, 0.36, 8.72),
        (0.348, 0.35, 8.19),
    ],
)
def test_versions_that_were_served_and_scored_low_are_not_rejected(noise: float, score: float, distance: float) -> None:
    """Canaries of live runs: the noise's 0.9 quantile per token, and what a well-served version scored over 145."""
    found = Comparison(score=score, distance=distance, residual=noise, tokens=145)
    assert judge(found, [noise] * NOISE_SAMPLES) is Verdict.INDISTINGUISHABLE


def test_nothing_is_rejected_before_the_noise_is_measured() -> None:
    assert not rejects(Verdict.FAILED, [0.05] * (NOISE_SAMPLES - 1))
    assert rejects(Verdict.FAILED, [0.05] * NOISE_SAMPLES)
    assert not rejects(Verdict.INDISTINGUISHABLE, [0.05] * NOISE_SAMPLES)


def test_noise_samples_are_the_newest_of_accepted_versions() -> None:
    noise = [float(i) for i in range(NOISE_SAMPLES)]
    assert with_sample(noise, comparison(1.0), Verdict.VERIFIED) == [*noise[1:], 0.05]
    assert with_sample(noise, comparison(0.0), Verdict.FAILED) == noise
