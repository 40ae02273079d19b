"""Kills a process group at a named point, from outside the product's code.

Python imports this module at start-up when its folder is on PYTHONPATH, so every process that `evergreen up` starts
carries it. A point is a function of the product; a file `$EVERGREEN_TEST_KILL_DIR/<point>-<before|after>` arms it: the
first process to reach the point takes the file away and kills its own process group with SIGKILL.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

KILL_DIR = os.environ.get("EVERGREEN_TEST_KILL_DIR")


def _points() -> dict[str, dict[str, str]]:
    """module -> {attribute path: point}, from lines `point module attribute` in the folder's file `points`."""
    points: dict[str, dict[str, str]] = {}
    for line in Path(str(KILL_DIR), "points").read_text().splitlines():
        point, module, attribute = line.split()
        points.setdefault(module, {})[attribute] = point
    return points


def _kill_if_armed(point: str, moment: str) -> None:
    try:
        os.unlink(Path(str(KILL_DIR), f"{point}-{moment}"))
    except FileNotFoundError:
        return
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _wrap(function: Callable[..., Any], point: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            _kill_if_armed(point, "before")
            result = await function(*args, **kwargs)
            _kill_if_armed(point, "after")
            return result

        return asynchronous

    @functools.wraps(function)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        _kill_if_armed(point, "before")
        result = function(*args, **kwargs)
        _kill_if_armed(point, "after")
        return result

    return synchronous


class _Patching(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named modules by the ordinary way and wraps their points right after they are executed."""

    def __init__(self, points: dict[str, dict[str, str]]) -> None:
        self.points = points
        self.loaders: dict[str, Any] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self.points or name in self.loaders:
            return None
        self.loaders[name] = None  # the look-up below must not come back here
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            raise ImportError(f"crash point in unknown module {name}")
        self.loaders[name] = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loaders[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loaders[module.__name__].exec_module(module)
        for attribute, point in self.points[module.__name__].items():
            owner: Any = module
            *parents, last = attribute.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            setattr(owner, last, _wrap(getattr(owner, last), point))


if KILL_DIR:
    sys.meta_path.insert(0, _Patching(_points()))
