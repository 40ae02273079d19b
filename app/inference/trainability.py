"""May an interaction be trained? Only if it was sampled as the learner assumes: from softmax(logits / T) alone."""

from dataclasses import dataclass

from app.rollouts.states import SkipReason

MIN_TRAINED_TEMPERATURE = 0.2
"""Below it the behaviour distribution is so sharp that importance ratios say nothing."""


@dataclass(frozen=True)
class Untrainable:
    reason: SkipReason
    detail: str
    """A sentence for whoever asks why."""


def untrainable(*, temperature: float, top_p: float, top_k: int, opted_out: bool) -> Untrainable | None:
    """None: trainable. An allow-list: what else a request may ask for (max_tokens, stop, seed) leaves the distribution
    as it is, and requests.NOT_SERVED refuses the rest.

    Args:
        top_p: 1.0 is none. top_k: 0 is none.
    """
    if opted_out:
        return Untrainable(SkipReason.OPTED_OUT, "The request said metadata.train = false.")
    off = SkipReason.OFF_DISTRIBUTION_SAMPLING
    if temperature < MIN_TRAINED_TEMPERATURE:
        return Untrainable(
            off, f"temperature {temperature:g} is below {MIN_TRAINED_TEMPERATURE:g}, the least that is trained."
        )
    if top_p < 1:
        return Untrainable(off, f"top_p {top_p:g} cuts the distribution; only top_p 1 (or none) is trained.")
    if top_k > 0:
        return Untrainable(off, f"top_k {top_k} cuts the distribution; only requests without top_k are trained.")
    return None
