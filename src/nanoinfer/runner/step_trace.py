"""A trace of some engine steps: every operation on the CPU and the GPU, in a file for a trace viewer."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule


class StepTrace:
    """Records `count` steps after `skip + 1` others (the profiler itself needs one to warm up) of this process.

    `step` is called after each engine step. Nothing is written before `close`, which the steps would wait for.
    """

    def __init__(self, path: Path, *, skip: int, count: int) -> None:
        self.path = path
        self._before, self._count = skip + 1, count
        self._steps = 0
        self._closed = False
        # Else the library below torch writes lines of its own into the display; it reads this when it first starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities, schedule=schedule(wait=skip, warmup=1, active=count, repeat=1), acc_events=True
        )
        self._profiler.start()

    def step(self) -> None:
        if not self._closed:
            self._steps += 1
            self._profiler.step()

    def close(self) -> int:
        """End the recording and write it as a Chrome trace; returns how many steps are in it. 0: there is no file."""
        recorded = min(max(self._steps - self._before, 0), self._count)
        if not self._closed:
            self._closed = True
            self._profiler.stop()
            if recorded:
                self._profiler.export_chrome_trace(str(self.path))
        return recorded
