# SPDX-License-Identifier: Apache-2.0
"""Sweeps on Ray.

The ledger of points stays in the process that sweeps: it hands out points, and a point is finished when its record is
in the ledger. Workers have no state that anybody would miss. A task that died with its worker is handed out again, so
nothing that was finished is lost, and a point is run again only if it had not been finished.

A trace goes into the object store once. A worker turns it into a trace when it first has a point of it, and keeps it
for the points that follow.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from . import _pagetide
from ._pagetide import Error

#: How often a point may die with its worker before the sweep ends: it may be the point that kills them.
TRIES_MAX = 5
#: The name of tasks, which their workers are seen under.
TASK = "pagetide-point"
#: How many tasks a CPU of the cluster is given ahead, so that no worker waits for the next one.
AHEAD = 2


def payload(trace: _pagetide.Trace) -> tuple[str, list[tuple[str, bytes]]]:
    """A trace as it travels: its recipe, or nothing, and names and contents of its files."""

    def content(path: str) -> tuple[str, bytes]:
        try:
            with open(path, "rb") as file:
                return path, file.read()
        except OSError as error:
            raise Error(f"{path}: {error.strerror or error}") from error

    recipe = trace.recipe()
    if recipe is not None:
        return recipe, [content(os.fspath(log)) for log in trace.logs()]
    if trace.path is not None:
        return "", [content(os.fspath(trace.path))]
    with tempfile.TemporaryDirectory(prefix="pagetide-") as directory:
        path = os.path.join(directory, "trace.parquet")
        trace.write(path, "parquet")
        return "", [content(path)]


class _Unpacked:
    """A trace that has travelled, and the runs over it."""

    def __init__(self, recipe: str, contents: list[tuple[str, bytes]]) -> None:
        # Lives as long as this: the runs read the files again.
        self._directory = tempfile.TemporaryDirectory(prefix="pagetide-")
        self._names: list[tuple[str, str]] = []
        paths = []
        for number, (name, content) in enumerate(contents):
            path = os.path.join(self._directory.name, f"trace-{number}")
            with open(path, "wb") as file:
                file.write(content)
            paths.append(path)
            self._names.append((path, name))
        if recipe:
            trace = _pagetide.Trace.build(None, recipe).with_logs(paths)
        else:
            trace = _pagetide.Trace.read(paths[0])
        self._jobs = _pagetide.Jobs(trace)

    def run(self, job: str) -> str:
        """Runs a job; an error names the files as whoever sent them does."""
        try:
            return self._jobs.run(job)
        except Error as error:
            reason = str(error)
            for path, name in self._names:
                reason = reason.replace(path, name)
            raise Error(reason) from error


#: Traces of this worker by the reference that they came under. Few: a worker that changes sweeps forgets.
_unpacked: dict[str, _Unpacked] = {}
_UNPACKED_MAX = 8


def _work(job: str, traces: list[Any]) -> tuple[str, str]:
    """Runs a job on a worker: its record, or the sentence of its error.

    The reference to the trace is in a list, so that Ray does not fetch it for each task.
    """
    import ray

    (reference,) = traces
    key = reference.hex()
    try:
        unpacked = _unpacked.get(key)
        if unpacked is None:
            recipe, contents = ray.get(reference)
            while len(_unpacked) >= _UNPACKED_MAX:
                _unpacked.pop(next(iter(_unpacked)))
            unpacked = _unpacked[key] = _Unpacked(recipe, contents)
        return unpacked.run(job), ""
    except Error as error:
        return "", str(error)


def sweep(
    study: _pagetide.Study,
    out: str | None,
    jobs: int | None,
    address: str | None,
    progress: Callable[[int, int], object] | None,
) -> tuple[_pagetide.Table, dict[str, Any]]:
    """Runs a study on Ray."""
    try:
        import ray
    except ImportError as error:
        raise Error("backend='ray' needs Ray: pip install 'pagetide[ray]'") from error
    if jobs is not None and jobs < 1:
        raise Error("jobs is 0; take at least one task")
    began = time.monotonic()
    ours = False
    if not ray.is_initialized():
        ours = True
        try:
            # Without an address Ray would go to whatever cluster it finds; here one of our own begins.
            ray.init(address=address or "local", include_dashboard=False, log_to_driver=False, configure_logging=False)
        except Exception as error:
            raise Error(f"the Ray cluster {address or 'of this machine'} cannot be reached: {error}") from error
    elif address is not None and address not in ("auto", ray.get_runtime_context().gcs_address):
        raise Error(
            f"this process is connected to the Ray cluster at {ray.get_runtime_context().gcs_address} already; call "
            "ray.shutdown() before you name another"
        )
    try:
        ledger = _pagetide.Ledger(study, out)
        done = _Sweeping(ray, ledger, jobs, progress).run()
        table = ledger.close()
    finally:
        if ours:
            ray.shutdown()
    summary = {
        "out": out,
        "points": len(study),
        "skipped": study.skipped,
        "run": done.run_points,
        "kept": len(study) - done.run_points,
        "retried": done.retried,
        "requests": sum(row["requests"] for row in json.loads(table.to_json())),
        "elapsed_seconds": time.monotonic() - began,
    }
    return table, summary


class _Sweeping:
    """A sweep under way."""

    def __init__(
        self, ray: Any, ledger: _pagetide.Ledger, jobs: int | None, progress: Callable[[int, int], object] | None
    ) -> None:
        self.ray = ray
        self.ledger = ledger
        self.jobs = jobs
        self.progress = progress
        self.traces: dict[int, Any] = {}
        # Deaths are counted here and not by Ray, which would not tell.
        self.work = ray.remote(max_retries=0, num_cpus=1, name=TASK)(_work)
        self.retried = 0
        self.run_points = 0

    def run(self) -> _Sweeping:
        ray = self.ray
        waiting = deque(self.ledger.open_points())
        total, kept = len(self.ledger), len(self.ledger) - len(waiting)
        self.run_points = len(waiting)
        tries: dict[int, int] = {}
        flying: dict[Any, int] = {}
        finished = 0
        self._tell(kept, total)
        try:
            while waiting or flying:
                while waiting and len(flying) < self._most():
                    number = waiting.popleft()
                    flying[self._start(number)] = number
                ready, _ = ray.wait(list(flying), num_returns=1, timeout=0.5)
                for task in ready:
                    number = flying.pop(task)
                    try:
                        record, reason = ray.get(task)
                    except ray.exceptions.WorkerCrashedError as error:
                        self._again(number, tries, error)
                        waiting.appendleft(number)
                        continue
                    except ray.exceptions.RayError as error:
                        # A node that died, an object that went with it: the trace is put into the store again.
                        self._again(number, tries, error)
                        self.traces.pop(self.ledger.trace_of(number), None)
                        waiting.appendleft(number)
                        continue
                    if reason:
                        raise Error(self.ledger.at_point(number, reason))
                    self.ledger.keep(number, record)
                    finished += 1
                    self._tell(kept + finished, total)
        except BaseException:
            for task in flying:
                ray.cancel(task, force=True)
            raise
        return self

    def _tell(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)

    def _most(self) -> int:
        """Tasks at a time."""
        cpus = int(self.ray.cluster_resources().get("CPU", 1))
        return self.jobs if self.jobs is not None else max(1, cpus) * AHEAD

    def _start(self, number: int) -> Any:
        trace = self.ledger.trace_of(number)
        if trace not in self.traces:
            self.traces[trace] = self.ray.put(payload(self.ledger.trace(trace)))
        return self.work.remote(self.ledger.job(number), [self.traces[trace]])

    def _again(self, number: int, tries: dict[int, int], error: Exception) -> None:
        tries[number] = tries.get(number, 0) + 1
        self.retried += 1
        if tries[number] >= TRIES_MAX:
            raise Error(
                self.ledger.at_point(number, f"its worker died {TRIES_MAX} times; the last time: {error}")
            ) from error
