"""What an experiment's page draws, read from plotly's own figures, against values worked out by hand."""

from typing import Any

import pytest

from evergreen.experiment_report import COLOURS, MOVING, report_figures
from evergreen.experiment_runs import Series

ONE = Series(
    phases={1: [1.0] * MOVING, 2: [0.0, 0.0], 3: [0.0]},
    shares=[(0, {"cute": 0.5, "ghost": 0.5}), (40, {"cute": 1.0})],
    updates={"ev_before": [None, 0.5], "masked": [0.75, 0.25], "entropy": [2.0, 1.0]},
)
OTHER = Series(
    phases={1: [0.0] * MOVING, 2: [0.0, 1.0], 3: [1.0]},
    shares=[(0, {"cute": 1.0}), (60, {"ghost": 1.0})],
    updates={"ev_before": [0.25], "masked": [0.5], "entropy": [3.0]},
)
LEVEL = 0.6
FIGURES = report_figures({"sao": [ONE, OTHER], "group": [ONE]}, LEVEL)


def named(figure: Any, name: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name == name]


def test_the_page_shows_five_figures() -> None:
    assert list(FIGURES) == ["reward", "shares", "ev_before", "masked", "entropy"]


def test_every_second_phase_is_shaded() -> None:
    """Phase 2, which holds rollouts 129 and 130; a dotted line marks the level."""
    rectangles = [shape for shape in FIGURES["reward"].layout.shapes if shape.type == "rect"]
    assert [(shape.x0, shape.x1, shape.fillcolor) for shape in rectangles] == [(MOVING, MOVING + 2, "lightgrey")]
    assert rectangles[0].yref == "y domain"  # over the whole height
    lines = [shape for shape in FIGURES["reward"].layout.shapes if shape.type == "line"]
    assert [(shape.y0, shape.y1, shape.xref) for shape in lines] == [(LEVEL, LEVEL, "x domain")]


def test_the_reward_is_the_mean_over_seeds() -> None:
    """Windows end at rollouts 128 to 131. One seed has 128, 127, 126, 125 right ones in them, the other 0, 0, 1, 2."""
    (mean,) = named(FIGURES["reward"], "sao")
    assert list(mean.x) == [MOVING, MOVING + 1, MOVING + 2, MOVING + 3]
    assert list(mean.y) == pytest.approx([64 / 128, 63.5 / 128, 63.5 / 128, 63.5 / 128])
    (alone,) = named(FIGURES["reward"], "group")
    assert list(alone.y) == pytest.approx([1, 127 / 128, 126 / 128, 125 / 128])


def test_the_band_holds_all_seeds() -> None:
    """The highest on the way there, the lowest on the way back."""
    band, _mean = [trace for trace in FIGURES["reward"].data if trace.legendgroup == "sao"]
    assert list(band.x) == [128, 129, 130, 131, 131, 130, 129, 128]
    assert list(band.y) == pytest.approx([1, 127 / 128, 126 / 128, 125 / 128, 2 / 128, 1 / 128, 0, 0])
    assert (band.fill, band.fillcolor) == ("toself", COLOURS[0])


def test_shares_are_drawn_per_arm_and_category() -> None:
    """At 0, 40 and 60 rewarded rollouts; a seed keeps its newest version's share until the next one is seen."""
    sao, group = ([t for t in FIGURES["shares"].data if t.yaxis == axis] for axis in ("y", "y2"))
    assert {t.name: (list(t.x), list(t.y)) for t in sao} == {
        "cute": ([0, 40, 60], [0.75, 1.0, 0.5]),
        "ghost": ([0, 40, 60], [0.25, 0.0, 0.5]),
    }
    assert {t.name: (list(t.x), list(t.y)) for t in group} == {
        "cute": ([0, 40], [0.5, 1.0]),
        "ghost": ([0, 40], [0.5, 0.0]),
    }
    assert [title.text for title in FIGURES["shares"].layout.annotations] == ["sao", "group"]
    assert {t.name: t.line.color for t in sao} == {t.name: t.line.color for t in group}


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [("ev_before", [None, 0.5], [0.25]), ("masked", [0.75, 0.25], [0.5]), ("entropy", [2.0, 1.0], [3.0])],
)
def test_the_learners_figures_are_a_line_per_seed(name: str, one: list[float | None], other: list[float]) -> None:
    lines = named(FIGURES[name], "sao")
    assert [(list(line.x), list(line.y)) for line in lines] == [([1, 2], one), ([1], other)]
    assert {line.line.color for line in lines} == {COLOURS[0]}
    (alone,) = named(FIGURES[name], "group")
    assert (list(alone.y), alone.line.color) == (one, COLOURS[1])
    assert name in FIGURES[name].layout.title.text
