"""The learning curve as one HTML page that needs no network: plotly's JavaScript is inside."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as go

from envs.board import MOVING
from envs.results import Evaluation, Played, moving_means


def write_curve(path: Path, title: str, played: Sequence[Played], evaluations: Mapping[int, Evaluation | None]) -> None:
    """Moving mean of the rewards, served version and held-out accuracy over the rollouts, switches marked.

    evaluations: by phase.
    """
    rows = sorted(played, key=lambda one: one.index)
    numbers = list(range(1, len(rows) + 1))
    ends = {row.phase: number for number, row in zip(numbers, rows, strict=True)}
    figure = go.Figure()
    width = max(1, min(MOVING, len(rows)))  # of a run that is shorter than that there is one mean
    figure.add_scatter(
        x=numbers[width - 1 :],
        y=moving_means([row.reward for row in rows], width),
        name=f"sampled reward, mean of {width}",
        mode="lines+markers" if len(rows) == width else "lines",
    )
    measured = [(ends[phase], result.accuracy) for phase, result in evaluations.items() if result and phase in ends]
    figure.add_scatter(
        x=[end for end, _ in measured],
        y=[accuracy for _, accuracy in measured],
        name="greedy accuracy, held out",
        mode="markers",
        marker={"size": 12, "symbol": "diamond"},
    )
    figure.add_scatter(
        x=numbers, y=[row.version for row in rows], name="policy version", yaxis="y2", line={"width": 1, "dash": "dot"}
    )
    for end in list(ends.values())[:-1]:
        figure.add_vline(x=end + 0.5, line={"dash": "dash"}, annotation_text="switch")
    figure.update_layout(
        title=title,
        xaxis={"title": "rollouts"},
        yaxis={"title": "reward", "range": [-0.02, 1.02]},
        yaxis2={"title": "policy version", "overlaying": "y", "side": "right", "rangemode": "tozero"},
        legend={"orientation": "h"},
    )
    figure.write_html(path, include_plotlyjs=True)
