# SPDX-License-Identifier: Apache-2.0
"""Runs and sweeps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from . import _pagetide
from ._json import PathLike, nested, to_json
from ._outcome import Outcome
from ._pagetide import Error
from ._policy import Prefetcher, ReplacementPolicy, SourcePredictor
from ._table import Table
from ._trace import Trace

Policy = Union[ReplacementPolicy, SourcePredictor, Prefetcher]


class Sweep(Table):
    """The rows of a sweep, one a point, in the order of the study."""

    def __init__(self, native: _pagetide.Table, summary: dict[str, Any]) -> None:
        super().__init__(native)
        #: What was done: points, those run now, requests, seconds.
        self.summary = summary


def _study(
    study: PathLike | Mapping[str, Any],
    traces: Sequence[Trace] | None,
    settings: Mapping[str, Any] | None,
) -> _pagetide.Study:
    native = None if traces is None else [trace._native for trace in traces]
    if native == []:
        raise Error("the list of traces is empty, so there is nothing to run")
    if isinstance(study, Mapping):
        whole = nested({**study, **(settings or {})})
        return _pagetide.Study(None, to_json("the study", whole), [], native)
    assignments = [f"{key}={_toml(key, value)}" for key, value in (settings or {}).items()]
    return _pagetide.Study(os.fspath(study), "{}", assignments, native)


def _toml(key: str, value: object) -> str:
    """A setting as an assignment has it: JSON of text, numbers, truths and lists of these is TOML, too."""
    if isinstance(value, Mapping):
        raise Error(f"{key}: a setting of a study's file is one value; write '{key}.…' for those below it")
    return to_json(key, value)


def run(
    trace: Trace | None = None,
    *,
    preset: str | None = None,
    flavour: str | None = None,
    settings: Mapping[str, Any] | None = None,
    policies: Mapping[str, Policy] | None = None,
    study: PathLike | Mapping[str, Any] | None = None,
) -> Outcome:
    """Runs a trace through one configuration.

    ``preset`` is ``base``, ``hypertrio``, ``hypertrio-400`` or ``hypertrio-800``, ``flavour`` is ``paper`` or
    ``hypersio``, and ``settings`` are parameters by their names in a study: ``{"devtlb.entries": 128}``. A ``study``
    of one point, a TOML file or a mapping, may have all of these.

    ``policies`` replaces policies of the configuration by objects of Python's, by part: a :class:`ReplacementPolicy`
    for ``devtlb``, ``iotlb``, ``l1`` to ``l4``; a :class:`SourcePredictor` for ``predictor``; a :class:`Prefetcher` for
    ``prefetcher``. What one raises, and what it may not do, ends the run with an :class:`Error`.
    """
    if trace is None and study is None:
        raise Error("there is nothing to run: give a trace or a study")
    changes = {**(settings or {})}
    for name, value in (("preset", preset), ("flavour", flavour)):
        if value is not None:
            changes[name] = value
    points = _study({} if study is None else study, None if trace is None else [trace], changes)
    return Outcome._of(_pagetide.run(points, dict(policies or {})))


def sweep(
    study: PathLike | Mapping[str, Any],
    *,
    traces: Sequence[Trace] | None = None,
    settings: Mapping[str, Any] | None = None,
    out: PathLike | None = None,
    backend: str = "threads",
    jobs: int | None = None,
    address: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Sweep:
    """Runs every point of a study: a TOML file, or a mapping of the same keys, in which any value may be a list.

    ``traces`` take the place of the study's, and ``settings`` change it by key. With ``out`` the rows go into a
    Parquet file, too, and what is finished into a journal beside it, so that a sweep that was ended goes on where it
    was. ``progress`` is called with finished points and all of them.

    ``backend`` is ``threads``, ``jobs`` of this process, or ``ray``: then the points are tasks on the cluster at
    ``address``, on the one that this process is connected to, or on one that is started on this machine for the
    sweep, and at most ``jobs`` at a time. Rows do not depend on who ran them.
    """
    points = _study(study, traces, settings)
    path = None if out is None else os.fspath(out)
    if backend == "threads":
        if address is not None:
            raise Error("address is of a Ray cluster: take backend='ray' with it")
        table, summary = _pagetide.sweep(points, path, jobs, progress)
        return Sweep(table, json.loads(summary))
    if backend == "ray":
        from . import _ray

        return Sweep(*_ray.sweep(points, path, jobs, address, progress))
    raise Error(f"there is no backend '{backend}'; there are threads and ray")
