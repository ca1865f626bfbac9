# SPDX-License-Identifier: Apache-2.0
"""Traces of translation requests."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from . import _pagetide
from ._json import PathLike, nested, to_json


class Trace:
    """A trace: a recipe, from which it is made whenever it is read, a file, or events in memory.

    It has no constructor of its own; see :meth:`make`, :meth:`build`, :meth:`read` and :meth:`from_arrow`. Its events
    are Arrow by the PyCapsule interface, with the columns and metadata of the project's Parquet files.
    """

    def __init__(self, native: _pagetide.Trace) -> None:
        self._native = native

    @classmethod
    def make(
        cls,
        *,
        tenants: int,
        packets: int | None = None,
        workload: str = "iperf3",
        order: str | None = None,
        burst: int | None = None,
        seed: int | None = None,
        third: str | None = None,
        sids: str | None = None,
        uses: int | None = None,
        live: int | None = None,
        run: int | None = None,
        init_frac: float | None = None,
        stagger: str | None = None,
        unmap: str | None = None,
        end: str | None = None,
        weights: Sequence[int] | None = None,
        membership: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Trace:
        """Synthetic tenants, with the words of ``pagetide trace make``.

        ``settings`` sets any other figure by its key in a recipe, such as ``{"lengths.min_packets": 100}``. Nothing
        is stored: the trace is made whenever it is read.
        """
        figures = {
            "tenants": tenants,
            "packets": packets,
            "workload": workload,
            "order": order,
            "burst": burst,
            "seed": seed,
            "third": third,
            "sids": sids,
            "uses": uses,
            "live": live,
            "run": run,
            "init_frac": init_frac,
            "stagger": stagger,
            "unmap": unmap,
            "end": end,
            "weights": list(weights) if weights is not None else None,
            "membership": membership,
        }
        given = {name: value for name, value in figures.items() if value is not None}
        flat = to_json("the settings", dict(settings or {}))
        return cls(_pagetide.Trace.make(to_json("the figures of a trace", given), flat))

    @classmethod
    def build(cls, recipe: PathLike | Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> Trace:
        """A recipe: a TOML file as for ``pagetide trace build``, or a mapping of the same keys.

        ``settings`` changes it by key: ``{"tenants": 64}``.
        """
        if isinstance(recipe, Mapping):
            whole = {**nested(recipe), **(settings or {})}
            return cls(_pagetide.Trace.build(None, to_json("the recipe", whole)))
        flat = to_json("the settings", dict(settings or {}))
        return cls(_pagetide.Trace.build(os.fspath(recipe), flat))

    @classmethod
    def read(cls, path: PathLike) -> Trace:
        """The trace in a file of any format that ``pagetide trace`` knows. It is read when it is used."""
        return cls(_pagetide.Trace.read(os.fspath(path)))

    @classmethod
    def from_arrow(cls, table: object, *, requests_per_packet: int | None = None) -> Trace:
        """The events of any table that has ``__arrow_c_stream__``, as those of pyarrow, polars and pandas.

        Columns are those of the project's Parquet files, of any integer type: ``source``, ``domain`` and ``iova``,
        and if they are there ``time_ns``, ``page_size_bytes``, ``access`` and ``kind``. Without ``kind`` all rows are
        requests. ``requests_per_packet`` goes before what the table's metadata says; without either it is 3.
        """
        return cls(_pagetide.Trace.from_arrow(table, requests_per_packet))

    @property
    def kind(self) -> str:
        """``recipe``, ``file`` or ``memory``."""
        return self._native.kind

    @property
    def recipe(self) -> dict[str, Any] | None:
        """The complete recipe, if there is one."""
        text = self._native.recipe()
        return None if text is None else json.loads(text)

    @property
    def path(self) -> str | None:
        """The file, if it is one."""
        path = self._native.path
        return None if path is None else os.fspath(path)

    @property
    def requests_per_packet(self) -> int | None:
        """Consecutive requests that make a packet; ``None`` if the format does not say."""
        return self._native.requests_per_packet()

    def info(self) -> dict[str, Any]:
        """Events, kinds, sources, pages and times, counted in one pass, as ``pagetide trace info`` has them."""
        if self.kind == "file":
            found: dict[str, Any] = json.loads(self._native.info())
            return found
        with tempfile.TemporaryDirectory(prefix="pagetide-") as directory:
            path = os.path.join(directory, "trace.parquet")
            self.write(path)
            return Trace.read(path).info()

    def write(self, path: PathLike, format: str | None = None) -> int:
        """Writes it to a file, and returns how many events it has.

        ``format`` is ``parquet`` or ``hypersio-binary``; without it the latter if the name ends in
        ``iotlb_trace.bin``, else ``parquet``.
        """
        return self._native.write(os.fspath(path), format)

    def in_memory(self) -> Trace:
        """The same events in memory: 40 bytes each, and made or read once instead of in every run."""
        return Trace(self._native.in_memory()[0])

    def __repr__(self) -> str:
        about: object = self.path if self.kind == "file" else self.kind
        recipe = self.recipe
        if recipe is not None:
            about = f"{recipe.get('tenants')} tenants, {recipe.get('packets')} packets"
        return f"<pagetide.Trace: {about}>"

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._native.__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        return self._native.__arrow_c_schema__()
