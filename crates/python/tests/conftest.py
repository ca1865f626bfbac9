# SPDX-License-Identifier: Apache-2.0
"""Traces that the tests share."""

import pytest

import pagetide


@pytest.fixture
def small():
    """Some tenants, in well under a second."""
    return pagetide.Trace.make(tenants=40, packets=2000, workload="websearch")
