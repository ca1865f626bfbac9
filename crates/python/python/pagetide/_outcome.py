# SPDX-License-Identifier: Apache-2.0
"""The outcome of one run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from . import _pagetide
from ._table import Table


@dataclass(frozen=True)
class CacheCounts:
    """Events of one cache; a cache that does not exist has no look-ups."""

    lookups: int
    hits: int
    insertions: int
    evictions: int
    invalidated: int

    @property
    def hit_rate(self) -> float:
        """Hits of all look-ups; 0 if there were none."""
        return self.hits / self.lookups if self.lookups else 0.0


@dataclass(frozen=True)
class Caches:
    """Counts of all caches."""

    context_cache: CacheCounts
    devtlb: CacheCounts
    prefetch_buffer: CacheCounts
    iotlb: CacheCounts
    l1: CacheCounts
    l2: CacheCounts
    l3: CacheCounts
    l4: CacheCounts
    nested_tlb: CacheCounts
    pasid_cache: CacheCounts


@dataclass(frozen=True)
class Latency:
    """Times that a group of requests took, in nanoseconds; exact."""

    mean_ns: float
    p50_ns: int
    p90_ns: int
    p99_ns: int
    p999_ns: int
    max_ns: int


@dataclass(frozen=True)
class Prefetch:
    """Counts of the prefetch unit."""

    sent: int
    filled: int
    register_writes: int


@dataclass(frozen=True)
class Faults:
    """I/O page faults of a run."""

    waits: int
    held_requests: int
    page_requests: int
    page_requests_per_second: float
    page_ins: int
    page_outs: int
    parked_requests_most: int
    resident_share: float
    service: Latency
    faulting: Latency
    neighbours: Latency


@dataclass(frozen=True)
class Device:
    """One of several devices."""

    tenants: int
    requests: int
    packets: int
    dropped_slots: int
    idle_slots: int
    gbps: float
    link_share: float


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    #: Identity of configuration and trace; runs of one identity give the same. None with policies of one's own.
    id: str | None
    #: The preset that the configuration was derived from.
    preset: str
    #: The complete configuration.
    config: dict[str, Any]
    #: How long the run took.
    wall_seconds: float
    #: Simulated time.
    elapsed_ns: int
    #: Requests of the trace, all ended.
    requests: int
    #: Whole packets of the trace, all ended.
    packets: int
    #: Slots of the link in which the packet found no room and had to be sent again.
    dropped_slots: int
    #: Bytes of those packets.
    bytes: int
    #: Goodput, in gigabits a second.
    gbps: float
    #: Goodput as a fraction of the rate of all links together.
    link_share: float
    #: Invalidations applied.
    invalidations: int
    #: Page walks.
    walks: int
    #: Memory accesses of those walks.
    walk_accesses: int
    #: Counts of the caches.
    caches: Caches
    #: Counts of the prefetch unit.
    prefetch: Prefetch
    #: Time from a request's entry to its end.
    latency: Latency
    #: Jain's index over the tenants' mean times of a request, refusals included: 1 if all are served equally.
    fairness: float
    #: Tenants, in the order of their first requests: a row each.
    tenants: Table
    #: I/O page faults, if they are part of the configuration.
    faults: Faults | None
    #: Devices, if there are several.
    devices: list[Device]

    @classmethod
    def _of(cls, text: str) -> Outcome:
        record: dict[str, Any] = json.loads(text)
        figures: dict[str, Any] = record.pop("figures")
        caches = {name: CacheCounts(**counts) for name, counts in figures.pop("caches").items()}
        faults = figures.pop("faults", None)
        if faults is not None:
            for group in ("service", "faulting", "neighbours"):
                faults[group] = Latency(**faults[group])
        return cls(
            **record,
            caches=Caches(**caches),
            prefetch=Prefetch(**figures.pop("prefetch")),
            latency=Latency(**figures.pop("latency")),
            tenants=Table(_pagetide.Table.of_json(json.dumps(figures.pop("tenants", [])))),
            faults=None if faults is None else Faults(**faults),
            devices=[Device(**device) for device in figures.pop("devices", [])],
            **figures,
        )
