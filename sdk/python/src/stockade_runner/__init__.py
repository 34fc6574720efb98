"""Processes of a run, for authors of LangBot runners.

``open_process(ctx, argv=[...])`` starts a program where the run may run programs, and
returns a :class:`Process` to write to, read from, wait for and close. Below it is
:class:`RunProcessAPI`, the five calls as they go over the wire.
"""

from stockade_runner.api import RunProcessAPI
from stockade_runner.models import (
    Chunk,
    CloseResult,
    Exit,
    Gap,
    IOLimits,
    Limits,
    ProcessInfo,
    ReadResult,
    Record,
    StdinState,
    Winsize,
)
from stockade_runner.errors import OutputLost, ProcessError
from stockade_runner.process import Process, open_process, process_limits

__all__ = [
    "Chunk",
    "CloseResult",
    "Exit",
    "Gap",
    "IOLimits",
    "Limits",
    "OutputLost",
    "Process",
    "ProcessError",
    "ProcessInfo",
    "ReadResult",
    "Record",
    "RunProcessAPI",
    "StdinState",
    "Winsize",
    "open_process",
    "process_limits",
]
