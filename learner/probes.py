"""The canary's probe positions: a few prompts at which every version of a policy is compared with its parent."""

from collections.abc import Sequence
from itertools import takewhile

from learner.trajectory import Trajectory

PROBES = 8


def choose_probes(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """At most 8 different prompts (token ids), fixed at a policy's first batch.

    A probe is a prefix of a trajectory that ends before an action token: before its first one, and where the batch has
    fewer than 8 different prompts, before later ones. Of many, those 8 are taken that share the longest prefix, which
    an engine then computes once.
    """
    prefixes = {tuple(t.token_ids[: t.action_positions[0]].tolist()) for t in trajectories}
    if len(prefixes) < PROBES:
        later = sorted(
            (position, i) for i, t in enumerate(trajectories) for position in t.action_positions[1:].tolist()
        )
        for position, i in later:
            if len(prefixes) == PROBES:
                break
            prefixes.add(tuple(trajectories[i].token_ids[:position].tolist()))
    # in sorted order the prefix that a run of neighbours shares is that of its first and last
    ordered = sorted(prefixes)
    runs = [ordered[i : i + PROBES] for i in range(max(1, len(ordered) - PROBES + 1))]
    best = max(runs, key=lambda run: _shared(run[0], run[-1]))
    return [list(prompt) for prompt in best]


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
