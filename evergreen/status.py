"""`evergreen status`: the processes of a home, and what its policies are doing."""

from datetime import datetime, timedelta

from rich.console import Console
from rich.table import Table

from app.db.models import Policy, Update
from app.db.repositories.events import list_events
from app.db.repositories.policies import list_policies
from app.db.repositories.updates import running_update
from app.db.session import Database
from app.db.types import clock
from app.settings import Settings
from evergreen.home import ChildState, is_held, read_states

EVENTS_SHOWN = 5
SILENT = timedelta(seconds=60)
"""A learn worker that idles gives a sign of life every few seconds."""


def show_status(settings: Settings, console: Console) -> bool:
    """Prints it. Returns whether `up` runs in this home."""
    home = settings.home.resolve()
    running = is_held(home)
    console.print(f"{home}: {'running' if running else 'not running'}")
    if running:
        _show_processes(read_states(home), console)
    if settings.database_url_setting or (home / "evergreen.db").exists():
        _show_policies(settings, console)
    return running


def _show_processes(states: list[ChildState], console: Console) -> None:
    table = Table("process", "pid", "restarts", "last death")
    for state in states:
        pid = str(state.pid) if state.pid else "down"
        table.add_row(
            state.name, f"{pid} (keeps dying)" if state.keeps_dying else pid, str(state.deaths), state.last_death
        )
    console.print(table)
    for state in states:
        if state.keeps_dying:
            console.print(f"the end of {state.log}:")
            for line in state.last_lines:
                console.print(f"    {line}", markup=False, highlight=False)


def _show_policies(settings: Settings, console: Console) -> None:
    database = Database(settings.database_url, sqlite_synchronous=settings.sqlite_synchronous)
    try:
        with database.read() as session:
            policies, events, now = list_policies(session), list_events(session, EVENTS_SHOWN), clock(session)
            table = Table("policy", "live", "head", "updates", "learning", "the learner")
            for policy in policies:
                update = running_update(session, policy.id)
                table.add_row(policy.name, _number(policy.live), _number(policy.head), str(policy.updates_done),
                              "on" if policy.learning else "off", learner_in_words(policy, update, now))  # fmt: skip
    finally:
        database.close()
    console.print(table)
    for event in events:
        console.print(f"{event.at:%Y-%m-%d %H:%M:%S} {event.kind}: {event.message}", markup=False, highlight=False)


def _number(version: int | None) -> str:
    return "-" if version is None else str(version)


def learner_in_words(policy: Policy, update: Update | None, now: datetime) -> str:
    """What the policy's learner does. update: its running one, if any. now: by the database's clock."""
    if update is not None and update.lease_until > now:
        return f"training since {update.started_at:%H:%M:%S}"
    if policy.learner_seen_at is None:
        return "not seen yet"
    silent = now - policy.learner_seen_at
    last = policy.idle_reason or "it had trained"
    if silent > SILENT:
        return f"not seen since {policy.learner_seen_at:%Y-%m-%d %H:%M:%S}: no learn worker runs (then: {last})"
    return f"{policy.idle_reason or 'between two updates'} (seen {policy.learner_seen_at:%H:%M:%S})"
