"""`evergreen simulate ENVIRONMENT`: play an environment against a running server. Also `python -m envs.cli`."""

import asyncio
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
from envs.journal import Journal
from envs.play import Player, PlaySettings
from envs.results import phase_figures, write_rollouts, write_summary
from envs.tickets import Tickets

simulate_app = typer.Typer(no_args_is_help=True)


@simulate_app.callback()
def simulate() -> None:
    """Play an evolving environment against a running server, reward its answers and draw the learning curve."""


@simulate_app.command()
def tickets(
    seed: Annotated[int, typer.Option(help="Draws tickets, examples and mappings.")],
    out: Annotated[Path, typer.Option(help="Directory for the results; must not hold an earlier run.")],
    phases: Annotated[int, typer.Option(min=1, help="Each phase but the first starts with a switch.")] = 3,
    rollouts_per_phase: Annotated[int, typer.Option(min=1)] = 1120,
    agents: Annotated[int, typer.Option(min=1, help="Requests at once in the closed loop.")] = 16,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Rollouts started per second, whatever the learner does. Default: closed loop."),
    ] = None,
    policy: Annotated[str, typer.Option(help="Name of the policy to ask.")] = "default",
    env_training_texts: Annotated[int, typer.Option(min=60, help="Tickets that rollouts draw from.")] = 180,
    env_held_out_texts: Annotated[int, typer.Option(min=1, help="Tickets kept for measuring.")] = 200,
    give_up_after: Annotated[
        float, typer.Option(min=0, help="Seconds of nothing but failed requests before the run stops.")
    ] = 300.0,
    url: Annotated[str, typer.Option(envvar="EVERGREEN_URL")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(envvar="EVERGREEN_API_KEY", help="A key for inference and feedback.")] = "",
) -> None:
    """Support tickets of three intents go to three queues; every switch moves every intent."""
    console = Console()
    if not api_key:
        raise typer.BadParameter("set EVERGREEN_API_KEY; the embedded server's lies in $EVERGREEN_HOME/admin.key")
    if (out / "journal.jsonl").exists():
        raise typer.BadParameter(f"{out} already holds a run; give another --out")
    try:
        environment = Tickets(
            seed,
            phases=phases,
            rollouts_per_phase=rollouts_per_phase,
            training_texts=env_training_texts,
            held_out_texts=env_held_out_texts,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    settings = PlaySettings(policy=policy, agents=agents, rate=rate, give_up_after_s=give_up_after)
    about = {"environment": "tickets", "seed": seed, "policy": policy, "url": url, "agents": agents, "rate": rate}
    try:
        asyncio.run(run(environment, settings, url, api_key, out, about, console))
    except Stopped as stopped:
        console.print(f"stopped: {stopped}", style="bold", soft_wrap=True, markup=False)
        raise typer.Exit(1) from stopped


async def run(
    environment: Tickets,
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
                "held_out_texts": len(environment.held_out_tickets),
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
            write_summary(out / "summary.json", summary)
            write_curve(out / "curve.html", f"tickets, seed {about['seed']}", rows, player.evaluations)
    console.print_json(data=summary["phases"])


if __name__ == "__main__":
    simulate_app()
