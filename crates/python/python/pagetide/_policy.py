# SPDX-License-Identifier: Apache-2.0
"""What policies of one's own look like. A class need not inherit from these: the methods are what counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional, Protocol

from ._pagetide import Entries, Page


class ReplacementPolicy(Protocol):
    """Which entry of a full set a cache gives up.

    Only ``victim`` is needed. A class may have these, too, and each that it does not have is not called, which is
    faster:

    ``used(entries, at, next_use)``
        Entry ``at`` was used. ``next_use`` is the index of the next request for the same page among the requests of
        the trace, if the run knows the future, else ``None``.
    ``inserted(entries, at, next_use)``
        Entry ``at`` is new. It has not been used yet.
    ``removed(entries, at)``
        Entry ``at`` is void.
    ``moved(entries, from_, to)``
        What was entry ``from_`` is entry ``to`` of the same set now, in the place of one that was removed; its mark
        has moved, too.
    """

    def victim(self, entries: Entries, set: int, /) -> int:
        """The entry of the full set that goes; it is replaced without a call of ``removed``. An entry that is not in
        the set ends the run with an error."""


class SourcePredictor(Protocol):
    """Which tenant follows which, for the paper's prefetch unit.

    A class may have ``set_length(length)``, too: the history-length register is written.
    """

    def observe(self, tenant: int, /) -> Optional[int]:
        """``tenant`` issues a request; returns the tenant to prefetch for, if there is one. Tenants are numbered in
        the order of their first requests; one that has made none yet ends the run with an error."""


class Prefetcher(Protocol):
    """What is prefetched and when, in the place of the whole prefetch unit.

    A class may have ``set_length(length)``, too.
    """

    def looked_up(self, page: Page, step: str, /) -> Optional[Iterable[Page]]:
        """The device has looked a request for ``page`` up; ``step`` is ``devtlb-hit``, ``buffer-hit`` or ``miss``.
        Returns the pages to be prefetched. A page that no request can be for ends the run with an error."""
