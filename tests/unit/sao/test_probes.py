"""The canary's probe positions are chosen from the first batch."""

from learner.batch import build_trajectories
from learner.probes import choose_probes
from learner.trajectory import Trajectory
from tests.unit.sao.rollouts import interaction, rollout


def trajectories(*prompts: list[int], completion: tuple[int, ...] = (1,)) -> list[Trajectory]:
    return build_trajectories([rollout(interaction(str(p), None, p, completion)) for p in prompts])


def test_the_prompts_that_share_the_longest_prefix_are_taken() -> None:
    shared = [[7, 7, 7, 100 + i] for i in range(8)]
    others = [[i, 1, 2, 3] for i in range(20)]
    assert choose_probes(trajectories(*others[:12], *shared, *others[12:])) == shared


def test_equal_prompts_count_once_and_later_positions_fill_up() -> None:
    """Two prompts with 3 and 1 action tokens: positions before tokens 1, 2, 3 of the first, and of the second's one."""
    batch = [
        *trajectories([5, 6], [5, 6], completion=(1, 2, 3)),
        *trajectories([4]),
    ]
    assert choose_probes(batch) == [[4], [5, 6], [5, 6, 1], [5, 6, 1, 2]]


def test_never_more_than_eight() -> None:
    probes = choose_probes(trajectories([3], completion=tuple(range(1, 30))))
    assert probes == [[3, *range(1, n)] for n in range(1, 9)]
