# SPDX-License-Identifier: Apache-2.0
"""Shows that the package does what the command line does, and what it costs: ``python -m pagetide.check --json``.

The command line's program is that of ``--cli``, of the environment's ``PAGETIDE``, or ``pagetide`` on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from typing import Any

import pagetide

from ._ray import TASK

#: Columns that tell who ran a point and when, not what it gave.
PROVENANCE = {"git_commit", "host", "pagetide_version", "program_sha256", "started_at", "wall_seconds"}

#: Two presets, two replacements, made traces of four sizes: every part of the model.
STUDY = """\
preset = ["base", "hypertrio"]
devtlb.replacement = ["lru", "lfu"]
[[trace]]
tenants = [8, 64, 256, 1024]
packets = {packets}
input.synthetic.workload = ["iperf3", "websearch"]
"""


class Lru:
    """LRU, as a Python class: the built-in one must give the same."""

    def __init__(self) -> None:
        self.tick = 0

    def used(self, entries: pagetide.Entries, at: int, next_use: int | None) -> None:
        self.tick += 1
        entries.set_mark(at, self.tick)

    inserted = used

    def victim(self, entries: pagetide.Entries, set: int) -> int:
        marks = entries.marks(set)
        return set * len(marks) + marks.index(min(marks))


class Latest:
    """The predictor of the paper: the tenant that came ``length`` requests later, as last seen."""

    def __init__(self, length: int = 48) -> None:
        self.length = length
        self.recent: deque[int] = deque()
        self.successors: dict[int, int] = {}

    def observe(self, tenant: int) -> int | None:
        predicted = self.successors.get(tenant)
        if len(self.recent) == self.length:
            self.successors[self.recent.popleft()] = tenant
        self.recent.append(tenant)
        return predicted


class Failed(Exception):
    """A part of the check could not be made."""


def program(given: str | None) -> str:
    """The command line's program."""
    wanted = given or os.environ.get("PAGETIDE") or "pagetide"
    found = shutil.which(wanted)
    if found is None:
        raise Failed(f"the program '{wanted}' is not there; build it, and give it with --cli")
    return found


def rows_without_provenance(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must be equal, whoever ran it."""
    return [
        {name: value for name, value in row.items() if name not in PROVENANCE and value is not None} for row in rows
    ]


def table_of(path: str) -> list[dict[str, Any]]:
    """The rows of a file of results."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise Failed("reading the command line's results needs pyarrow: pip install pyarrow") from error
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return found


def cpu_seconds(command: list[str]) -> float:
    """CPU time of a command, that of its children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"'{' '.join(command[:3])} …' failed: {done.stderr.strip()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def against_cli(cli: str, packets: int, rounds: int, directory: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The same study by the command line and by this package: rows and CPU time, alternated."""
    study = os.path.join(directory, "study.toml")
    with open(study, "w", encoding="utf-8") as file:
        file.write(STUDY.format(packets=packets))
    costs: dict[str, list[float]] = {"cli": [], "python": []}
    tables: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for name in ("cli", "python"):
            # A fresh name: a journal would leave nothing to run.
            out = os.path.join(directory, f"{name}-{number}.parquet")
            code = "import pagetide, sys; pagetide.sweep(sys.argv[1], out=sys.argv[2], jobs=1)"
            command = {
                "cli": [cli, "sim", "sweep", study, "--out", out, "--jobs", "1"],
                "python": [sys.executable, "-c", code, study, out],
            }[name]
            costs[name].append(cpu_seconds(command))
            tables[name] = rows_without_provenance(table_of(out))
    # What the same sweep gives in memory is the same, too.
    in_memory = pagetide.sweep(study)
    equal = tables["cli"] == tables["python"] and [row["id"] for row in in_memory] == [
        row["id"] for row in tables["cli"]
    ]
    figures = {
        "points": len(tables["cli"]),
        "rows_equal_cli": equal,
        "cpu_seconds_cli": min(costs["cli"]),
        "cpu_seconds_python": min(costs["python"]),
    }
    return figures, {"cpu_over_cli": min(costs["python"]) / min(costs["cli"])}


def same(ours: pagetide.Outcome, theirs: pagetide.Outcome) -> bool:
    """Whether two runs gave the same."""

    def figures(outcome: pagetide.Outcome) -> dict[str, Any]:
        kept = {**outcome.__dict__, "tenants": outcome.tenants.rows()}
        # A run with policies of one's own has no identity.
        del kept["wall_seconds"], kept["id"]
        return kept

    return figures(ours) == figures(theirs)


def own_policies(packets: int) -> dict[str, Any]:
    """LRU and the predictor written again in Python, and how fast they are."""
    trace = pagetide.Trace.make(tenants=256, packets=packets, workload="websearch")
    lru = {f"{cache}.replacement": "lru" for cache in ("devtlb", "l2", "l3")}
    built_in = pagetide.run(trace, preset="hypertrio", settings=lru)
    caches = {cache: Lru() for cache in ("devtlb", "l2", "l3")}
    began = time.process_time()
    own = pagetide.run(trace, preset="hypertrio", settings=lru, policies=caches)
    cpu = time.process_time() - began
    predicted = pagetide.run(trace, preset="hypertrio", settings=lru, policies={"predictor": Latest()})
    return {
        "own_lru_equal": same(own, built_in) and built_in.caches.devtlb.evictions > 0,
        "own_predictor_equal": same(predicted, built_in) and built_in.prefetch.sent > 0,
        "python_policy_requests_per_second": round(own.requests / cpu),
    }


def on_ray(address: str | None, points: int, packets: int) -> tuple[dict[str, Any], dict[str, float]]:
    """The same study on threads and on Ray, and once more with a worker killed."""
    try:
        import ray
    except ImportError as error:
        raise Failed("--ray needs Ray: pip install 'pagetide[ray]'") from error
    study = {
        "preset": ["base", "hypertrio"],
        "seed": list(range(points // 4)),
        "trace": [{"tenants": [64, 256], "packets": packets, "input": {"synthetic": {"workload": "websearch"}}}],
    }
    if not ray.is_initialized():
        ray.init(address=address or "local", include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        # Workers start, and import the package, before anything is timed.
        pagetide.sweep(study | {"seed": [0, 1]}, backend="ray")
        local = pagetide.sweep(study)
        clustered = pagetide.sweep(study, backend="ray")
        killed = threading.Event()

        def kill(done: int, total: int) -> None:
            if not killed.is_set() and done >= total // 4:
                for process in workers():
                    os.kill(process, signal.SIGKILL)
                    killed.set()
                    return

        broken = pagetide.sweep(study, backend="ray", progress=kill)
    finally:
        ray.shutdown()
    expected = rows_without_provenance(local.rows())
    figures = {
        "points": len(expected),
        "rows_equal": rows_without_provenance(clustered.rows()) == expected,
        "rows_equal_worker_killed": rows_without_provenance(broken.rows()) == expected,
        "retried_points": broken.summary["retried"],
        "lost_points": len(expected) - len(broken),
        "wall_seconds_local": local.summary["elapsed_seconds"],
        "wall_seconds_ray": clustered.summary["elapsed_seconds"],
    }
    ratio = clustered.summary["elapsed_seconds"] / local.summary["elapsed_seconds"]
    return figures, {"wall_over_local": ratio}


def workers() -> list[int]:
    """Ray's workers that have a task and are descendants of this process: a cluster of others is left alone."""
    parents: dict[int, int] = {}
    busy: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                # The name in brackets may have spaces; the parent is the second word after it.
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{name}/cmdline", encoding="utf-8", errors="replace") as file:
                if file.read().startswith(f"ray::{TASK}"):
                    busy.append(int(name))
        except (OSError, IndexError, ValueError):
            continue  # It has ended meanwhile.

    def is_ours(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == os.getpid():
                return True
        return False

    return [process for process in busy if is_ours(process)]


def differences(figures: dict[str, Any]) -> list[str]:
    """The figures that show a defect."""
    unequal = [name for name, value in figures.items() if value is False]
    return unequal + [name for name in ("lost_points",) if figures.get(name, 0) != 0]


def main(arguments: list[str] | None = None) -> int:
    """The command: 0, 1 if something differs that is to be equal, 2 if it could not be checked."""
    parser = argparse.ArgumentParser(prog="python -m pagetide.check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--cli", metavar="PROGRAM", help="the command line's program")
    parser.add_argument("--packets", type=int, default=50_000, metavar="N", help="packets of a run (50,000)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds, of which the best counts (3)")
    parser.add_argument("--ray", action="store_true", help="check sweeps on Ray instead")
    parser.add_argument("--address", metavar="ADDRESS", help="a Ray cluster; without it one on this machine")
    parser.add_argument("--points", type=int, default=200, metavar="N", help="points on Ray (200)")
    given = parser.parse_args(arguments)
    try:
        if given.ray:
            figures, ratios = on_ray(given.address, given.points, given.packets)
        else:
            with tempfile.TemporaryDirectory(prefix="pagetide-") as directory:
                figures, ratios = against_cli(program(given.cli), given.packets, given.rounds, directory)
            figures.update(own_policies(given.packets))
    except (Failed, pagetide.Error) as error:
        print(f"pagetide.check: {error}", file=sys.stderr)
        return 2
    report = {"name": "python-ray" if given.ray else "python", "figures": figures, "ratios": ratios}
    if given.json:
        print(json.dumps(report))
    else:
        for name, value in [*figures.items(), *ratios.items()]:
            print(f"{name:36} {value}")
    wrong = differences(figures)
    if wrong:
        print(f"pagetide.check: not as it is to be: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
