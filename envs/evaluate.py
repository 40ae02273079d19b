"""Held-out evaluation: greedy answers of one pinned policy version, opted out of training.

What is opted out needs no name that ties a rollout's turns together.
"""

from collections import deque
from collections.abc import Sequence

from envs.asking import Asking, Stopped, VersionNotLoaded, together
from envs.environment import Episode, Sampling
from envs.results import Evaluation

_TRIES = 5


async def evaluate(
    asking: Asking, policy: str, version: int, episodes: Sequence[Episode], *, max_tokens: int, agents: int, phase: int
) -> Evaluation:
    """Ask all episodes of `policy@version` at temperature 0.

    If that version is retired meanwhile everything is asked again of the newest, so that one figure is one version's.
    """
    greedy = Sampling(max_tokens=max_tokens, temperature=0.0)
    for _ in range(_TRIES):
        try:
            ended = await ask_pinned(asking, policy, version, episodes, greedy, agents=agents, phase=phase)
        except VersionNotLoaded:
            version = await _newest_version(asking, policy, episodes[0], greedy, phase)
        else:
            rewards = [episode.judge(answer) for episode, answer in ended]
            return Evaluation(version, asked=len(rewards), correct=sum(rewards))
    raise Stopped(f"{_TRIES} versions of {policy} were retired, each before its held-out evaluation had ended")


async def ask_pinned(
    asking: Asking,
    policy: str,
    version: int,
    episodes: Sequence[Episode],
    sampling: Sampling,
    *,
    agents: int,
    phase: int,
) -> list[tuple[Episode, str]]:
    """Where each of the episodes ended and the answer that ended it, all asked of `policy@version`.

    Raises:
        VersionNotLoaded: it is retired, perhaps after some answers. Stopped: another version answered.
    """
    todo = deque(episodes)
    ended: list[tuple[Episode, str]] = []

    async def agent() -> None:
        while todo:
            episode = todo.popleft()
            model = f"{policy}@{version}"
            completion = await asking.ask(model, episode.messages, sampling, train=False, phase=phase)
            if completion is None:
                todo.append(episode)
            elif completion.version != version:
                raise Stopped(f"asked {model}, but the reply says version {completion.version}")
            elif (following := episode.after(completion.answer)) is not None:
                todo.appendleft(following)
            else:
                ended.append((episode, completion.answer))

    await together(*(agent() for _ in range(agents)))
    return ended


async def _newest_version(asking: Asking, policy: str, episode: Episode, greedy: Sampling, phase: int) -> int:
    """The version that serves the policy now; one opted-out request tells."""
    while True:
        completion = await asking.ask(policy, episode.messages, greedy, train=False, phase=phase)
        if completion is not None:
            return completion.version
