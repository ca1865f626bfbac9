# SPDX-License-Identifier: Apache-2.0
"""The paper's figures, and pictures of one's own results."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Iterable, Union

from . import _pagetide
from ._json import PathLike
from ._pagetide import Error
from ._table import Table


@dataclass(frozen=True)
class Picture:
    """An SVG picture; notebooks show it."""

    #: What distinguishes it within its figure.
    name: str
    #: The reading of the paper that it is computed under; empty if none matters.
    reading: str
    #: The name of its file; empty if it has none.
    file: str
    #: The picture.
    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def write(self, path: PathLike) -> None:
        """Writes it to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, computed by the model; notebooks show its pictures."""

    id: str
    title: str
    section: str
    about: str
    #: Files with data and study, in the directory of the figures.
    files: list[str]
    #: The paper's numbers beside ours: ``what``, ``paper``, and ``ours`` by reading.
    beside: list[dict[str, Any]]
    pictures: list[Picture]

    def _repr_html_(self) -> str:
        pictures = "".join(picture.svg for picture in self.pictures)
        return f"<h4>{html.escape(self.id)}: {html.escape(self.title)}</h4><p>{html.escape(self.about)}</p>{pictures}"


@dataclass(frozen=True)
class Figures:
    """Figures that were computed and drawn."""

    figures: list[Figure]
    #: The page with all of them; it needs no network.
    page: str
    points: int
    run: int
    skipped: int
    requests: int
    wall_seconds: float

    def __getitem__(self, id: str) -> Figure:
        for figure in self.figures:
            if figure.id == id:
                return figure
        raise KeyError(id)

    def __iter__(self) -> Iterator[Figure]:
        return iter(self.figures)

    def __len__(self) -> int:
        return len(self.figures)


def figure_names() -> list[str]:
    """Names of all figures."""
    return _pagetide.figure_names()


def figures(
    out: PathLike,
    *,
    packets: int = 100_000,
    only: Sequence[str] = (),
    jobs: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Figures:
    """Computes and draws the paper's figures into the directory ``out``, as ``pagetide sim figures`` does.

    ``only`` names some (:func:`figure_names`); fewer ``packets`` are faster and less exact. What was ended goes on where
    it was.
    """
    if isinstance(only, str):
        only = [only]
    found: dict[str, Any] = json.loads(_pagetide.figures(os.fspath(out), packets, list(only), jobs, progress))
    drawn = [
        Figure(**{**figure, "pictures": [Picture(**picture) for picture in figure["pictures"]]})
        for figure in found.pop("figures")
    ]
    return Figures(figures=drawn, **found)


def chart(
    table: Union[Table, Iterable[Mapping[str, Any]]],
    *,
    x: str,
    y: str,
    by: str | None = None,
    title: str | None = None,
) -> Picture:
    """A line for each value of column ``by``, of column ``y`` over the values of column ``x``, in their order.

    >>> pagetide.chart(table, x="trace_tenants", y="gbps", by="preset")
    """
    rows = list(table)
    for column in (x, y) if by is None else (x, y, by):
        if not any(row.get(column) is not None for row in rows):
            raise Error(f"the table has no column '{column}' with a value")
    places = list(dict.fromkeys(str(row.get(x)) for row in rows))
    lines: dict[str, list[float | None]] = {}
    for row in rows:
        name = y if by is None else str(row.get(by))
        line = lines.setdefault(name, [None] * len(places))
        at = places.index(str(row.get(x)))
        if line[at] is not None:
            raise Error(
                f"two rows have {x} = {row.get(x)}" + ("" if by is None else f" and {by} = {name}") + "; choose rows, or 'by'"
            )
        try:
            value = row.get(y)
            line[at] = None if value is None else float(value)
        except (TypeError, ValueError) as error:
            raise Error(f"column '{y}' has {row.get(y)!r}, which is no number") from error
    svg = _pagetide.chart(title or f"{y} by {x}", x, y, places, list(lines.items()))
    return Picture(name=title or "", reading="", file="", svg=svg)
