"""`evergreen status`: the processes of a home, and what its policies are doing."""

from rich.console import Console
from rich.table import Table

from app.db.models import Policy
from app.db.repositories.events import list_events
from app.db.repositories.policies import list_policies
from app.db.session import Database
from app.settings import Settings
from evergreen.home import ChildState, is_held, read_states

EVENTS_SHOWN = 5


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
            policies, events = list_policies(session), list_events(session, EVENTS_SHOWN)
    finally:
        database.close()
    table = Table("policy", "live", "head", "updates", "learning", "the learner")
    for policy in policies:
        table.add_row(policy.name, _number(policy.live), _number(policy.head), str(policy.updates_done),
                      "on" if policy.learning else "off", _learner(policy))  # fmt: skip
    console.print(table)
    for event in events:
        console.print(f"{event.at:%Y-%m-%d %H:%M:%S} {event.kind}: {event.message}", markup=False, highlight=False)


def _number(version: int | None) -> str:
    return "-" if version is None else str(version)


def _learner(policy: Policy) -> str:
    if policy.learner_seen_at is None:
        return "not seen yet"
    return f"{policy.idle_reason or 'training'} (seen {policy.learner_seen_at:%H:%M:%S})"
