"""The verbs of `molt`, how they are mounted, and what an error does: a box, an exit code, no traceback."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import cyclopts
from cyclopts import App

from molt import __version__
from molt.cli import ablate_verbs, audit_verbs, log_verbs, parity_verbs, plan_verbs, run_verbs, sft_verbs, train_verbs
from molt.cli.report import emit_error
from molt.errors import MoltError, SettingError
from molt.view.stop import STOPPED_BY_HAND

ROOMS = (train_verbs, plan_verbs, sft_verbs, run_verbs, audit_verbs, ablate_verbs, parity_verbs, log_verbs)
"""Modules that bring verbs; each has `mount(app)`."""
CHATTY = ("torchao", "torch.utils._pytree")
"""Libraries that warn, when they are imported, of kernels and classes that no run here uses."""


def make_app() -> App:
    """The application with every verb."""
    app = App(
        name="molt",
        help="Molt: agentic reinforcement learning whose trajectory log is the transport.",
        version=__version__,
        version_flags=["--version"],
    )
    for room in ROOMS:
        room.mount(app)
    return app


def run(tokens: Sequence[str]) -> int:
    """Run one command line; returns its exit code: 0 done, 1 failed, 2 wrong setting, 3 stalled, 130 stopped by hand."""
    as_json = "--json" in tokens
    for library in CHATTY:
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        result = make_app()(list(tokens), exit_on_error=False, print_error=False, result_action="return_value")
    except cyclopts.CycloptsError as error:
        emit_error(SettingError(f"{error}; `molt --help` and `molt VERB --help` list what there is"), as_json=as_json)
        return 2
    except MoltError as error:
        emit_error(error, as_json=as_json)
        return error.exit_code
    except BrokenPipeError:
        _mute_stdout()
        return 0
    except OSError as error:
        emit_error(error, as_json=as_json)
        return 1
    except KeyboardInterrupt:
        print("stopped by hand", file=sys.stderr)
        return STOPPED_BY_HAND
    except BaseExceptionGroup as group:
        return _first_cause(group, as_json=as_json)
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _first_cause(group: BaseExceptionGroup, *, as_json: bool) -> int:
    """Tell the first error of a task group; the others followed from it."""
    cause: BaseException = group
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, KeyboardInterrupt):
        print("stopped by hand", file=sys.stderr)
        return STOPPED_BY_HAND
    emit_error(cause, as_json=as_json)
    return getattr(cause, "exit_code", 1)


def _mute_stdout() -> None:
    """Keep the interpreter from flushing into a closed pipe at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
