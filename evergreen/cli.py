"""The command line: `evergreen up`, `demo`, `status`, `prepare`, `reset`, `replay`, `simulate` and so on."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console
from sqlalchemy.exc import OperationalError

from app.errors import ApiError
from app.settings import DEFAULT_POLICY, Settings, get_settings
from envs.cli import simulate_app
from evergreen.home import HomeInUse
from evergreen.ports import PortBusy
from evergreen.reset import NotOurs

app = typer.Typer(no_args_is_help=True, help="An LLM endpoint that learns on the job.", pretty_exceptions_enable=False)
app.add_typer(simulate_app, name="simulate")
experiment_app = typer.Typer(no_args_is_help=True)
app.add_typer(experiment_app, name="experiment")


@experiment_app.callback()
def experiment() -> None:
    """Whole runs on servers of their own, compared in one report."""


@app.command()
def up() -> None:
    """Run the server in the foreground: engine, app, learner, control. Ctrl-C drains and stops it."""
    settings = _settings()  # before anything that reads them when it is imported
    from evergreen.up import up as run

    run(settings)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(
    context: typer.Context,
    seed: Annotated[int, typer.Option(help="Seed of the simulated tickets.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Where the results go. Default: in the home.")] = None,
) -> None:
    """Watch a small model follow an environment that changes. Further options go to `simulate tickets`."""
    from evergreen.demo import demo as run

    settings = _settings()
    out = out or settings.home.resolve() / "demo" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-seed-{seed}"
    raise typer.Exit(run(settings, seed, out, context.args))


@app.command()
def status() -> None:
    """Show the processes of this home and what its policies are doing. Exit status 1: `up` does not run."""
    from evergreen.status import show_status

    raise typer.Exit(0 if show_status(_settings(), Console()) else 1)


@app.command()
def prepare() -> None:
    """Bring schema, base model, default policy and admin key into place. `up` does it first; repeating it is safe."""
    # these import torch, which hardly another command needs
    from evergreen.prepare import AnotherModel
    from evergreen.prepare import prepare as run
    from learner.prepare import ModelUnavailable

    try:
        run(_settings())
    except (AnotherModel, ModelUnavailable) as error:
        _stop(str(error))


@app.command("pretrain-value")
def pretrain_value(
    policy: Annotated[str, typer.Option(help="Name of the policy.")] = DEFAULT_POLICY,
    epochs: Annotated[int, typer.Option(min=1, help="How often the history is gone through.")] = 1,
    on_learner: Annotated[
        bool, typer.Option("--on-learner", help="Let the running learn worker do it, and return at once.")
    ] = False,
) -> None:
    """Train a policy's critic on its logged rollouts. It waits for a running update; the next one goes on from it."""
    from evergreen.pretrain import pretrain, send_pretraining

    settings = _settings()
    if on_learner:
        send_pretraining(settings, policy, epochs)
        typer.echo("Asked the learn worker; its event value_pretrained (/admin/events) will say how it went.")
    elif not pretrain(settings, policy, epochs, typer.echo):
        raise typer.Exit(1)


@app.command()
def reset(yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Delete what this home has learned and logged: database, weights, keys, logs. The base model stays."""
    from evergreen.reset import reset as run

    def confirm(paths: list[Path]) -> None:
        if not paths:
            typer.echo("There is nothing to delete.")
            return
        typer.echo("This deletes:\n" + "\n".join(f"  {path}" for path in paths))
        if not yes:
            typer.confirm("Go on?", abort=True)

    run(_settings(), confirm)


@app.command()
def replay(
    to: Annotated[int, typer.Option(help="The version to rebuild.")],
    policy: Annotated[str, typer.Option(help="The policy's name.")] = DEFAULT_POLICY,
    start: Annotated[
        int | None,
        typer.Option("--from", help="Begin after this version. Default: the nearest one whose checkpoint is kept."),
    ] = None,
) -> None:
    """Rebuild a version from a checkpoint, or version 0, and the database alone. Exit status 1: its hash differs."""
    from evergreen.replay import replay as run

    raise typer.Exit(0 if run(_settings(), policy, to, start, typer.echo) else 1)


@experiment_app.command()
def online(
    env: Annotated[str, typer.Option(help="tickets, writing or tools.")] = "writing",
    arms: Annotated[str, typer.Option(help="Comma-separated; see docs/experiments/README.md.")] = "sao,running_mean",
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    phases: Annotated[int | None, typer.Option(min=1, help="Only the first ones. Default: all.")] = None,
    rollouts_per_phase: Annotated[int, typer.Option(min=1)] = 1120,
    watch: Annotated[int, typer.Option(min=1, help="Held-out episodes that every version is asked.")] = 24,
    level: Annotated[
        float, typer.Option(help="A switch is recovered from once the mean of 128 rewards is there.")
    ] = 0.6,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=JSON", help="A learning setting of every arm.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where runs and report go. Default: in the home.")] = None,
    port: Annotated[int, typer.Option(help="Of each run's server; its engine takes the next one.")] = 24500,
) -> None:
    """The paper's online experiment: arms on one schedule, each run on a fresh server. Resumes where it stopped."""
    from evergreen.experiment import Schedule, run_online

    settings = _settings()
    schedule = Schedule(
        env, rollouts_per_phase, watch, dict(map(_setting, changes or [])), settings.model, settings.dtype, phases
    )
    out = out or settings.home.resolve() / "experiments" / f"online-{env}"
    try:
        report = run_online(schedule, [arm.strip() for arm in arms.split(",")], seeds, out, port, level, typer.echo)
    except (ValueError, RuntimeError) as error:
        _stop(str(error))
    typer.echo(f"report: {report}")


def main() -> None:
    try:
        app()
    except (HomeInUse, PortBusy, NotOurs) as error:
        _stop(str(error))
    except ApiError as error:
        _stop(error.message)
    except OperationalError as error:
        _stop(f"the database cannot be used (DATABASE_URL): {error.orig}")


def _setting(change: str) -> tuple[str, Any]:
    """NAME=JSON; what is no JSON is a text."""
    name, equals, value = change.partition("=")
    if not equals:
        _stop(f"--set {change}: it takes NAME=JSON, policy_lr=3e-3 for example")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _settings() -> Settings:
    try:
        return get_settings()
    except ValidationError as error:
        lines = [f"{'.'.join(str(part) for part in wrong['loc'])}: {wrong['msg']}" for wrong in error.errors()]
        _stop("settings that cannot be used (environment variables EVERGREEN_...):\n" + "\n".join(lines))


def _stop(message: str) -> NoReturn:
    typer.echo(message, err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
