"""`--profile DIR`: traces some steps of a run into a file of that folder, and says where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from nanoinfer.cli.session import Session
from nanoinfer.errors import UserError
from nanoinfer.ui.text import plural

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

TRACED_STEPS = 32


def make_folder(folder: Path | None) -> None:
    """Called before the model is loaded, so that a folder that cannot be written is refused in time."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".nanoinfer"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror}; choose another folder for --profile.") from error


@contextmanager
def traced(session: Session, llm: LLM, folder: Path | None, command: str, *, skip: int) -> Iterator[None]:
    """Trace steps of what runs inside, after the first `skip`; however it ends, what was recorded is written."""
    if folder is None:
        yield
        return
    path = _new_file(folder, command)
    trace = llm.trace_steps(path, skip=skip, count=TRACED_STEPS)
    try:
        yield
    finally:
        steps = trace.close()
        if steps:
            session.console.say(
                f"trace of {plural(steps, 'step')}, which it slowed down: {path}; open it with https://ui.perfetto.dev "
                "or chrome://tracing."
            )
        else:
            session.console.warn(f"no trace: the run ended within its first {skip + 2} steps; give it more to do.")


def _new_file(folder: Path, command: str) -> Path:
    name = f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (f"{name}{'' if number == 1 else f'-{number}'}.json.gz" for number in count(1))
    return next(folder / name for name in names if not (folder / name).exists())
