"""A rank that does what NANOINFER_TEST_FAULT says, and notes its process id and where it is in NANOINFER_TEST_LOG."""

from __future__ import annotations

import os
import signal
import time

from nanoinfer import worker

FAULT = os.environ.get("NANOINFER_TEST_FAULT", "none")
STEP = int(os.environ.get("NANOINFER_TEST_STEP", "6"))


def note(what: str) -> None:
    with open(os.environ["NANOINFER_TEST_LOG"], "a") as log:
        log.write(f"{what} {os.getpid()}\n")


def act(fault: str) -> None:
    if fault == "raise":
        raise ValueError("a bug in rank 1")
    if fault == "memory":
        import torch

        torch.empty(1 << 50)
    if fault == "exit":
        os._exit(7)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        while True:
            time.sleep(1)


def break_steps() -> None:
    from nanoinfer.runner.model_runner import ModelRunner
    from nanoinfer.runner.overlapped_runner import OverlappedRunner  # on a GPU

    count = 0

    def break_method(runner, name):  # type: ignore[no-untyped-def]
        run = getattr(runner, name)

        def faulty_run(self, batch):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            note("decode" if batch.num_decodes else "prefill")
            if FAULT == "slow":
                time.sleep(0.3)
            elif count == STEP:
                act(FAULT)
            return run(self, batch)

        setattr(runner, name, faulty_run)

    break_method(ModelRunner, "run")
    break_method(OverlappedRunner, "launch")


def break_load() -> None:
    from nanoinfer.loading import weights

    fill = weights.fill_weights

    def faulty_fill(*arguments):  # type: ignore[no-untyped-def]
        note("load")
        if FAULT == "slow-load":
            time.sleep(1000)  # longer than any patience
        if FAULT.startswith("load-"):
            act(FAULT.removeprefix("load-"))
        return fill(*arguments)

    weights.fill_weights = faulty_fill


note("start")
if FAULT.startswith("start-"):
    act(FAULT.removeprefix("start-"))
serve = worker._serve


def faulty_serve(*arguments):  # type: ignore[no-untyped-def]
    break_steps()
    break_load()
    serve(*arguments)


worker._serve = faulty_serve
worker.main()
