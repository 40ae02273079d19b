"""`evergreen simulate ENVIRONMENT`: play an environment against a running server. Also `python -m envs.cli`."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console

from envs.asking import Stopped, check_server
from envs.board import Board, Display
from envs.connection import Connection
from envs.curve import write_curve
from envs.environment import Environment
from envs.journal import Journal
from envs.play import UNFINISHED_LIMIT, Player, PlaySettings, check_groups
from envs.results import phase_figures, write_held_out, write_rollouts, write_summary
from envs.tickets import Tickets
from envs.tools import Tools
from envs.writing import Writing

simulate_app = typer.Typer(no_args_is_help=True)

Seed = Annotated[int, typer.Option(help="Draws everything that an environment draws.")]
Out = Annotated[Path, typer.Option(help="Directory for the results; must not hold an earlier run.")]
Phases = Annotated[int, typer.Option(min=1, help="Each phase but the first starts with a switch.")]
RolloutsPerPhase = Annotated[int, typer.Option(min=1)]
Agents = Annotated[int, typer.Option(min=1, help="Requests at once in the closed loop.")]
Rate = Annotated[
    float | None,
    typer.Option(min=0.001, help="Rollouts started per second, whatever the learner does. Default: closed loop."),
]
Watch = Annotated[
    int, typer.Option(min=0, help="Held-out episodes that every new version is asked, for held_out.csv. Default: none.")
]
GroupSize = Annotated[
    int,
    typer.Option(
        min=1,
        max=UNFINISHED_LIMIT,
        help="Rollouts of one prompt, under a tag `group`, for a policy that learns with advantage: group.",
    ),
]
Policy = Annotated[str, typer.Option(help="Name of the policy to ask.")]
GiveUpAfter = Annotated[float, typer.Option(min=0, help="Seconds of nothing but failed requests before the run stops.")]
Url = Annotated[str, typer.Option(envvar="EVERGREEN_URL")]
ApiKey = Annotated[str, typer.Option(envvar="EVERGREEN_API_KEY", help="A key for inference and feedback.")]

DEFAULT_URL = "http://127.0.0.1:8000"


@simulate_app.callback()
def simulate() -> None:
    """Play an evolving environment against a running server, reward its answers and draw the learning curve."""


@simulate_app.command()
def tickets(
    seed: Seed,
    out: Out,
    phases: Phases = 3,
    rollouts_per_phase: RolloutsPerPhase = 1120,
    agents: Agents = 16,
    rate: Rate = None,
    group_size: GroupSize = 1,
    watch: Watch = 0,
    policy: Policy = "default",
    env_training_texts: Annotated[int, typer.Option(min=60, help="Tickets that rollouts draw from.")] = 180,
    env_held_out_texts: Annotated[int, typer.Option(min=1, help="Tickets kept for measuring.")] = 200,
    give_up_after: GiveUpAfter = 300.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Support tickets of three intents go to three queues; every switch moves every intent."""

    def make() -> Tickets:
        return Tickets(
            seed,
            phases=phases,
            rollouts_per_phase=rollouts_per_phase,
            training_texts=env_training_texts,
            held_out_texts=env_held_out_texts,
        )

    settings = PlaySettings(
        policy=policy,
        agents=agents,
        rate=rate,
        group_size=group_size,
        watched=watch,
        give_up_after_s=give_up_after,
    )
    _simulate("tickets", seed, make, settings, url, api_key, out)


@simulate_app.command()
def writing(
    seed: Seed,
    out: Out,
    phases: Phases = 3,
    rollouts_per_phase: RolloutsPerPhase = 1120,
    agents: Agents = 16,
    rate: Rate = None,
    group_size: GroupSize = 1,
    watch: Watch = 0,
    policy: Policy = "default",
    env_held_out_topics: Annotated[int, typer.Option(min=1, help="Topics kept for measuring.")] = 60,
    give_up_after: GiveUpAfter = 300.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Lines in a style of one's choice; the style that is rewarded changes twice, and in phase 3 the pool does too."""

    def make() -> Writing:
        return Writing(seed, phases=phases, rollouts_per_phase=rollouts_per_phase, held_out_topics=env_held_out_topics)

    settings = PlaySettings(
        policy=policy,
        agents=agents,
        rate=rate,
        group_size=group_size,
        watched=watch,
        give_up_after_s=give_up_after,
    )
    _simulate("writing", seed, make, settings, url, api_key, out)


@simulate_app.command()
def tools(
    seed: Seed,
    out: Out,
    phases: Phases = 4,
    rollouts_per_phase: RolloutsPerPhase = 1120,
    agents: Agents = 16,
    rate: Rate = None,
    group_size: GroupSize = 1,
    watch: Watch = 0,
    policy: Policy = "default",
    env_held_out_orders: Annotated[int, typer.Option(min=1, help="Orders kept for measuring.")] = 100,
    give_up_after: GiveUpAfter = 300.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Several turns at an order desk's API, of which a tool is renamed, an argument changed and a tool retired."""

    def make() -> Tools:
        return Tools(seed, phases=phases, rollouts_per_phase=rollouts_per_phase, held_out_orders=env_held_out_orders)

    settings = PlaySettings(
        policy=policy,
        agents=agents,
        rate=rate,
        group_size=group_size,
        watched=watch,
        give_up_after_s=give_up_after,
    )
    _simulate("tools", seed, make, settings, url, api_key, out)


def _simulate(
    name: str,
    seed: int,
    make: Callable[[], Environment],
    settings: PlaySettings,
    url: str,
    api_key: str,
    out: Path,
) -> None:
    """Play what `make` returns; whatever is wrong with the options or the server becomes a sentence."""
    console = Console()
    if not api_key:
        raise typer.BadParameter("set EVERGREEN_API_KEY; the embedded server's lies in $EVERGREEN_HOME/admin.key")
    if (out / "journal.jsonl").exists():
        raise typer.BadParameter(f"{out} already holds a run; give another --out")
    try:
        environment = make()
        check_groups(environment, settings.group_size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    about = {
        "environment": name,
        "seed": seed,
        "policy": settings.policy,
        "url": url,
        "agents": settings.agents,
        "rate": settings.rate,
        "group_size": settings.group_size,
    }
    try:
        asyncio.run(run(environment, settings, url, api_key, out, about, console))
    except Stopped as stopped:
        console.print(f"stopped: {stopped}", style="bold", soft_wrap=True, markup=False)
        raise typer.Exit(1) from stopped


async def run(
    environment: Environment,
    settings: PlaySettings,
    url: str,
    api_key: str,
    out: Path,
    about: dict[str, Any],
    console: Console,
) -> None:
    """Play, and write what was measured, however the run ends. about: goes into the summary.

    Raises Stopped with a sentence when the run cannot start or go on.
    """
    board = Board(environment.phases, environment.rollouts_per_phase)
    display = Display(board, console)
    started_at, started, complete = datetime.now(UTC), monotonic(), False
    async with Connection(url, api_key) as connection:
        await check_server(connection)
        journal = Journal(out / "journal.jsonl")
        player = Player(environment, connection, journal, board, display, settings)
        try:
            await player.play()
            complete = True
        finally:
            journal.close()
            rows = sorted(player.played, key=lambda one: one.index)
            summary = about | {
                "complete": complete,
                "started_at": started_at.isoformat(),
                "seconds": round(monotonic() - started, 1),
                "rollouts_per_phase": environment.rollouts_per_phase,
                "held_out": len(environment.held_out(1)),
                "failed_requests": dict(board.failed_in_all()),
                "phases": [
                    {"phase": phase}
                    | phase_figures(
                        [row for row in rows if row.phase == phase], player.evaluations.get(phase), board.failed[phase]
                    )
                    for phase in range(1, environment.phases + 1)
                ],
            }
            write_rollouts(out / "rollouts.csv", rows, player.statuses)
            if settings.watched:
                write_held_out(out / "held_out.csv", player.held_out)
            write_summary(out / "summary.json", summary)
            write_curve(out / "curve.html", f"{about['environment']}, seed {about['seed']}", rows, player.evaluations)
    console.print_json(data=summary["phases"])


if __name__ == "__main__":
    simulate_app()
