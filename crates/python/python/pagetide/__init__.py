# SPDX-License-Identifier: Apache-2.0
"""A model of I/O address translation for a thousand tenants (HyperTRIO, ISCA 2020).

>>> import pagetide
>>> trace = pagetide.Trace.make(tenants=64, packets=20_000, workload="websearch")
>>> outcome = pagetide.run(trace, preset="hypertrio")
>>> table = pagetide.sweep({"preset": ["base", "hypertrio"]}, traces=[trace])

Traces and tables are Arrow by the PyCapsule interface: ``pyarrow.table(x)``, ``polars.DataFrame(x)`` and
``pandas.DataFrame.from_arrow(x)`` read them. Whatever takes long runs without the interpreter's lock, and an interrupt
ends it. What cannot be done is a :class:`pagetide.Error` that says why.
"""

from __future__ import annotations

from . import _pagetide
from ._figures import Figure, Figures, Picture, chart, figure_names, figures
from ._outcome import CacheCounts, Caches, Device, Faults, Latency, Outcome, Prefetch
from ._pagetide import Entries, Error, Page
from ._policy import Prefetcher, ReplacementPolicy, SourcePredictor
from ._run import Sweep, run, sweep
from ._table import Table
from ._trace import Trace

_pagetide.set_program(_pagetide.__file__)

__version__ = _pagetide.__version__

__all__ = [
    "CacheCounts",
    "Caches",
    "Device",
    "Entries",
    "Error",
    "Faults",
    "Figure",
    "Figures",
    "Latency",
    "Outcome",
    "Page",
    "Picture",
    "Prefetch",
    "Prefetcher",
    "ReplacementPolicy",
    "SourcePredictor",
    "Sweep",
    "Table",
    "Trace",
    "chart",
    "figure_names",
    "figures",
    "run",
    "sweep",
]
