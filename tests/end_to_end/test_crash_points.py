"""A kill's point is a name in the product: where that has moved, no process of the crash matrix can start."""

import importlib
from functools import reduce
from typing import Any

import pytest

from tests.end_to_end.test_crash_matrix import POINTS


@pytest.mark.parametrize("point", POINTS)
def test_every_point_is_a_function_of_the_product(point: str) -> None:
    module, attribute = POINTS[point].split()
    owner: Any = importlib.import_module(module)
    assert callable(reduce(getattr, attribute.split("."), owner))
