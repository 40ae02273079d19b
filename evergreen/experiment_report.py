"""One report of an experiment's runs: report.csv with a row per run and phase, and report.html, which needs no network.

Recovery is the number of rollouts from a phase's begin until the moving mean of its last MOVING rewards reaches the
level, censored at the phase's end; the settled level is the mean of the phase's last LAST rewards.
"""

import csv
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from envs.results import LAST, moving_means
from evergreen.experiment_runs import Series, read_run

MOVING = 128
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
LEARNER_FIGURES = ("ev_before", "masked", "entropy")


@dataclass(frozen=True)
class PhaseResult:
    arm: str
    seed: int
    phase: int
    rollouts: int
    recovery: int | None
    """None: censored, the level was not reached in this phase."""
    settled: float


def phase_results(arm: str, seed: int, phases: Mapping[int, Sequence[float]], level: float) -> list[PhaseResult]:
    """phases: phase -> its rewards in the order in which its rollouts started."""
    results = []
    for phase, rewards in phases.items():
        first = next((n for n, mean in enumerate(moving_means(rewards, MOVING)) if mean >= level), None)
        recovery = None if first is None else first + MOVING
        results.append(PhaseResult(arm, seed, phase, len(rewards), recovery, statistics.fmean(rewards[-LAST:])))
    return results


def write_report(out: Path, arms: Sequence[str], seeds: int, level: float) -> Path:
    """Reads the runs `ARM-seed-N` in `out`; returns the path of report.html."""
    runs = {(arm, seed): read_run(out / f"{arm}-seed-{seed}") for arm in arms for seed in range(1, seeds + 1)}
    results = [row for (arm, seed), run in runs.items() for row in phase_results(arm, seed, run.phases, level)]
    with (out / "report.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(PhaseResult)])
        table.writeheader()
        table.writerows(asdict(row) for row in results)
    of_arm = {arm: [runs[arm, seed] for seed in range(1, seeds + 1)] for arm in arms}
    parts = [
        figure.to_html(full_html=False, include_plotlyjs=number == 0)
        for number, figure in enumerate(report_figures(of_arm, level).values())
    ]
    path = out / "report.html"
    title = f"{out.resolve().name}: {', '.join(arms)}, {seeds} seeds"
    path.write_text(
        f"<!doctype html><meta charset='utf-8'><title>{escape(title)}</title><h1>{escape(title)}</h1>"
        f"<p>Recovery: rollouts until the moving mean of {MOVING} rewards reaches {level:g}. Settled: mean of the last "
        f"{LAST} rewards of a phase.</p>{_table(results)}{''.join(parts)}"
    )
    return path


def report_figures(of_arm: Mapping[str, Sequence[Series]], level: float) -> dict[str, go.Figure]:
    """What the page shows, in its order. of_arm: arm -> its runs, a seed each."""
    learner = {name: _learner(of_arm, name) for name in LEARNER_FIGURES}
    return {"reward": _rewards(of_arm, level), "shares": _shares(of_arm), **learner}


def summary_rows(results: Sequence[PhaseResult]) -> list[tuple[str, int, str, str, str]]:
    """(arm, phase, median recovery, censored runs, mean settled level with its range); a censored run counts as later
    than any other."""
    groups: dict[tuple[str, int], list[PhaseResult]] = defaultdict(list)
    for row in results:
        groups[row.arm, row.phase].append(row)
    rows = []
    for (arm, phase), group in groups.items():
        recoveries = sorted(float("inf") if row.recovery is None else row.recovery for row in group)
        median = statistics.median_high(recoveries)
        settled = [row.settled for row in group]
        rows.append(
            (
                arm,
                phase,
                "not reached" if median == float("inf") else f"{median:g}",
                f"{sum(row.recovery is None for row in group)} of {len(group)}",
                f"{statistics.fmean(settled):.3f} ({min(settled):.3f} to {max(settled):.3f})",
            )
        )
    return rows


def _table(results: Sequence[PhaseResult]) -> str:
    heads = ("arm", "phase", "recovery, median", "censored", "settled, mean (range)")
    cells = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in summary_rows(results)
    )
    return f"<table border='1' cellpadding='4'><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{cells}</table>"


def _rewards(of_arm: Mapping[str, Sequence[Series]], level: float) -> go.Figure:
    figure = go.Figure()
    for (arm, runs), colour in zip(of_arm.items(), COLOURS, strict=False):
        curves = [
            moving_means([reward for rewards in run.phases.values() for reward in rewards], MOVING) for run in runs
        ]
        _band(figure, arm, colour, list(range(MOVING, MOVING + min(map(len, curves)))), curves)
    ends = _phase_ends(next(iter(of_arm.values()))[0])
    for number, (begin, end) in enumerate(ends):
        if number % 2:
            figure.add_vrect(begin, end, fillcolor="lightgrey", opacity=0.35, line_width=0, layer="below")
    figure.add_hline(level, line={"dash": "dot", "color": "grey"})
    figure.update_layout(title=f"reward, moving mean of {MOVING}; band: all seeds", xaxis_title="rollouts")
    figure.update_yaxes(range=[-0.02, 1.02])
    return figure


def _shares(of_arm: Mapping[str, Sequence[Series]]) -> go.Figure:
    """Per arm the share of each category among held-out answers, over the rollouts rewarded so far; mean of seeds."""
    figure = make_subplots(rows=len(of_arm), cols=1, subplot_titles=list(of_arm), shared_xaxes=True)
    categories = sorted(
        {name for runs in of_arm.values() for run in runs for _, shares in run.shares for name in shares}
    )
    for row, runs in enumerate(of_arm.values(), start=1):
        points = sorted({rollouts for run in runs for rollouts, _ in run.shares})
        for number, name in enumerate(categories):
            means = [statistics.fmean(run.share_at(at, name) for run in runs) for at in points]
            figure.add_scatter(
                x=points,
                y=means,
                name=name,
                legendgroup=name,
                showlegend=row == 1,
                line={"color": COLOURS[number % len(COLOURS)]},
                row=row,
                col=1,
            )
    figure.update_yaxes(range=[-0.02, 1.02])
    figure.update_layout(
        title="held-out answers by category, per version; mean of seeds", height=260 * len(of_arm) + 120
    )
    return figure


def _learner(of_arm: Mapping[str, Sequence[Series]], name: str) -> go.Figure:
    figure = go.Figure()
    for (arm, runs), colour in zip(of_arm.items(), COLOURS, strict=False):
        for run in runs:
            values = run.updates[name]
            figure.add_scatter(
                x=list(range(1, len(values) + 1)),
                y=values,
                name=arm,
                legendgroup=arm,
                showlegend=run is runs[0],
                line={"color": colour, "width": 1},
            )
    figure.update_layout(title=f"{name} per update; a line per seed", xaxis_title="update")
    return figure


def _band(figure: go.Figure, arm: str, colour: str, x: Sequence[int], curves: Sequence[Sequence[float]]) -> None:
    columns = list(zip(*(curve[: len(x)] for curve in curves), strict=True))
    low, high = [min(column) for column in columns], [max(column) for column in columns]
    figure.add_scatter(
        x=[*x, *reversed(x)],
        y=[*high, *reversed(low)],
        fill="toself",
        fillcolor=colour,
        opacity=0.15,
        line={"width": 0},
        legendgroup=arm,
        showlegend=False,
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=list(x), y=[statistics.fmean(c) for c in columns], name=arm, legendgroup=arm, line={"color": colour}
    )


def _phase_ends(run: Series) -> list[tuple[int, int]]:
    """(first, last) rollout of each phase, over all phases."""
    spans, begin = [], 0
    for rewards in run.phases.values():
        spans.append((begin, begin + len(rewards)))
        begin += len(rewards)
    return spans
