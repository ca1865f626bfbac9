# SPDX-License-Identifier: Apache-2.0
"""Results as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from . import _pagetide


class Table:
    """A table of results: a row a point, a column for each parameter and figure.

    It is Arrow by the PyCapsule interface: ``pyarrow.table(t)``, ``polars.DataFrame(t)``,
    ``pandas.DataFrame.from_arrow(t)``. Without any of these it is a sequence of dictionaries.
    """

    def __init__(self, native: _pagetide.Table) -> None:
        self._native = native
        self._rows: list[dict[str, Any]] | None = None

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""
        return self._native.column_names

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self._native.num_rows

    def rows(self) -> list[dict[str, Any]]:
        """All rows; what a row does not have is missing in its dictionary, or ``None``."""
        if self._rows is None:
            rows: list[dict[str, Any]] = json.loads(self._native.to_json())
            self._rows = rows
        return self._rows

    def column(self, name: str) -> list[Any]:
        """The values of a column, ``None`` where a row has none."""
        if name not in self.column_names:
            raise _pagetide.Error(f"the table has no column '{name}'")
        return [row.get(name) for row in self.rows()]

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows()[number]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __repr__(self) -> str:
        return f"<pagetide.{type(self).__name__}: {self.num_rows} rows, {len(self.column_names)} columns>"

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._native.__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        return self._native.__arrow_c_schema__()
