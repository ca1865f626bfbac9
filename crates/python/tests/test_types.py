# SPDX-License-Identifier: Apache-2.0
"""The package is typed, and a program that uses it rightly passes the checker; one that does not, does not."""

import subprocess
import sys

import pytest

pytest.importorskip("mypy")

RIGHT = """
from typing import Optional
import pagetide

class Fifo:
    tick = 0
    def inserted(self, entries: pagetide.Entries, at: int, next_use: Optional[int]) -> None:
        self.tick += 1
        entries.set_mark(at, self.tick)
    def victim(self, entries: pagetide.Entries, set: int) -> int:
        return min(entries.of_set(set), key=entries.mark)

trace: pagetide.Trace = pagetide.Trace.make(tenants=4, packets=10)
outcome = pagetide.run(trace, preset="hypertrio", policies={"devtlb": Fifo()})
share: float = outcome.caches.devtlb.hit_rate
table: pagetide.Sweep = pagetide.sweep({"seed": [1]}, traces=[trace])
picture: pagetide.Picture = pagetide.chart(table, x="seed", y="gbps")
"""
WRONG = """
import pagetide
trace = pagetide.Trace.make(tenants="many")
pagetide.run(trace, policies={"devtlb": 5})
"""


def mypy(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *arguments], stdout=subprocess.PIPE, text=True, check=False
    )


def test_package_is_typed_through_and_through():
    done = mypy("-p", "pagetide", "--disable-error-code", "import-not-found", "--disable-error-code", "import-untyped")
    assert done.returncode == 0, done.stdout


def test_checker_passes_right_use_and_finds_wrong_use(tmp_path):
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(RIGHT)
    wrong.write_text(WRONG)
    done = mypy(str(right))
    assert done.returncode == 0, done.stdout
    done = mypy(str(wrong))
    assert done.stdout.count("error:") == 2, done.stdout
