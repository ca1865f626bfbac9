# SPDX-License-Identifier: Apache-2.0
"""Settings on their way to the native part, which reads them as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Union

from ._pagetide import Error

PathLike = Union[str, "os.PathLike[str]"]


def to_json(what: str, value: object) -> str:
    """``value`` as JSON; scalars of other libraries become Python's."""

    def plain(other: object) -> object:
        if isinstance(other, os.PathLike):
            return os.fspath(other)
        if hasattr(other, "item"):
            return other.item()
        if isinstance(other, (range, set, frozenset)):
            return list(other)
        raise TypeError(f"{what}: a value of type {type(other).__name__} is no number, text, list or table")

    try:
        return json.dumps(value, default=plain, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Error(f"{what}: {error}") from error


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"devtlb.entries": 64}`` as ``{"devtlb": {"entries": 64}}``, tables within tables joined."""
    whole: dict[str, Any] = {}
    for key, value in settings.items():
        *parts, last = str(key).split(".")
        table = whole
        for part in parts:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                raise Error(f"{key}: '{part}' is a value already")
            table = inner
        if isinstance(value, Mapping):
            value = nested(value)
            under = table.get(last)
            if isinstance(under, dict):
                value = {**under, **value}
        table[last] = value
    return whole
