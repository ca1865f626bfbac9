# SPDX-License-Identifier: Apache-2.0
# The native part; `pagetide` is what to use.
from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any, Optional, Union

_Path = Union[str, "PathLike[str]"]

__version__: str

class Error(Exception): ...

class Trace:
    kind: str
    path: Optional[str]
    @staticmethod
    def make(figures: str, settings: str) -> Trace: ...
    @staticmethod
    def build(path: Optional[_Path], table: str) -> Trace: ...
    @staticmethod
    def read(path: _Path) -> Trace: ...
    @staticmethod
    def from_arrow(table: object, requests_per_packet: Optional[int]) -> Trace: ...
    def recipe(self) -> Optional[str]: ...
    def logs(self) -> list[str]: ...
    def with_logs(self, logs: list[str]) -> Trace: ...
    def requests_per_packet(self) -> Optional[int]: ...
    def info(self) -> str: ...
    def write(self, path: _Path, format: Optional[str]) -> int: ...
    def in_memory(self) -> tuple[Trace, int]: ...
    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...
    def __arrow_c_schema__(self) -> object: ...

class Table:
    num_rows: int
    column_names: list[str]
    @staticmethod
    def of_json(text: str) -> Table: ...
    def to_json(self) -> str: ...
    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...
    def __arrow_c_schema__(self) -> object: ...

class Study:
    skipped: int
    def __init__(
        self, path: Optional[_Path], table: str, set: list[str], traces: Optional[list[Trace]]
    ) -> None: ...
    def __len__(self) -> int: ...
    def labels(self) -> list[str]: ...

class Ledger:
    def __init__(self, study: Study, out: Optional[_Path]) -> None: ...
    def __len__(self) -> int: ...
    def open_points(self) -> list[int]: ...
    def trace_of(self, number: int) -> int: ...
    def trace(self, trace: int) -> Trace: ...
    def job(self, number: int) -> str: ...
    def keep(self, number: int, run: str) -> None: ...
    def at_point(self, number: int, reason: str) -> str: ...
    def close(self) -> Table: ...

class Jobs:
    def __init__(self, trace: Trace) -> None: ...
    def run(self, job: str) -> str: ...

class Entries:
    """The entries of a cache, as a replacement policy sees them.

    Entries are named by their index in the whole cache: ``set * ways + way``. For each the cache keeps a number that
    only the policy reads and writes, its *mark*.
    """

    @property
    def ways(self) -> int:
        """Entries of a set."""
    def set_of(self, at: int) -> int:
        """The set that entry ``at`` is in."""
    def way_of(self, at: int) -> int:
        """Its place in the set."""
    def of_set(self, set: int) -> range:
        """The entries of a set."""
    def mark(self, at: int) -> int:
        """The policy's number of entry ``at``; 0 for a new one."""
    def marks(self, set: int) -> list[int]:
        """The numbers of a set's entries, in their order: one call instead of one an entry."""
    def set_mark(self, at: int, mark: int) -> None:
        """Changes it."""
    def key(self, at: int) -> tuple[int, int]:
        """Domain and first address of what entry ``at`` translates."""

class Page:
    """A page as a tenant asked for it: what a prefetcher sees and names."""

    def __init__(self, tenant: int, source: int, domain: int, iova: int, shift: int) -> None: ...
    @property
    def tenant(self) -> int:
        """The tenant, numbered in the order of first requests."""
    @property
    def source(self) -> int:
        """Its source id in the trace."""
    @property
    def domain(self) -> int:
        """Its domain."""
    @property
    def iova(self) -> int:
        """The address."""
    @property
    def shift(self) -> int:
        """log2 of the page's size: 12, 21 or 30."""
    def __hash__(self) -> int: ...

def set_program(path: str) -> None: ...
def build() -> str: ...
def run(study: Study, policies: dict[str, Any]) -> str: ...
def sweep(
    study: Study,
    out: Optional[_Path],
    jobs: Optional[int],
    progress: Optional[Callable[[int, int], object]],
) -> tuple[Table, str]: ...
def figure_names() -> list[str]: ...
def figures(
    out: _Path,
    packets: int,
    only: list[str],
    jobs: Optional[int],
    progress: Optional[Callable[[int, int], object]],
) -> str: ...
def chart(
    title: str,
    x_name: str,
    y_name: str,
    places: list[str],
    series: list[tuple[str, list[Optional[float]]]],
) -> str: ...
