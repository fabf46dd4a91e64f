"""The STRATAMPI_* variables, as the native runtime has read them (native/base/setting.c holds the one table).

They are read once per process, at the first question; a change of os.environ after that is not seen.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ._native import ffi, lib


class Row(NamedTuple):
    """One setting. `value` and `default` are texts ("64K"), `unit` is "bytes", "us", "ranks", "uses" or "name".

    `invalid`: the environment says something that was not understood, so `value` is the default.
    """

    name: str
    value: str
    default: str
    unit: str
    help: str
    invalid: bool


def _string(text: object) -> str:
    return bytes(ffi.string(text)).decode("utf-8", "replace")


_INDEX: dict[str, int] = {_string(lib.smpi_setting_name(i)): i for i in range(lib.SMPI_SET_COUNT)}


def text(name: str) -> str:
    """The value of the variable `name` as text: what the environment says, else the default.

    Raises:
        KeyError: there is no setting of this name.
    """
    return _string(lib.smpi_setting_text(_INDEX[name]))


def number(name: str) -> int:
    """The value of the numeric variable `name` in its unit, size suffixes worked out ("8K" is 8192).

    Raises:
        KeyError: there is no setting of this name.
    """
    return int(lib.smpi_setting_number(_INDEX[name]))


def table() -> list[Row]:
    """All settings in the order of the native table."""
    return [
        Row(
            name=name,
            value=text(name),
            default=_string(lib.smpi_setting_default(i)),
            unit=_string(lib.smpi_setting_unit(i)),
            help=_string(lib.smpi_setting_help(i)),
            invalid=bool(lib.smpi_setting_invalid(i)),
        )
        for name, i in _INDEX.items()
    ]


def complaints() -> list[str]:
    """One line for each variable whose text was not understood."""
    return [
        f"{row.name}={os.environ.get(row.name, '')!r} is not understood, {row.default} is used"
        for row in table()
        if row.invalid
    ]
