"""The program of ranks 1, 2, ... of tensor parallelism: builds its part of the data plane and runs the steps it hears.

Started by `runner.ranks` as `python -m nanoinfer.worker FD`, where FD is its end of the channel to rank 0; or it is any
program that torchrun has started with a rank above 0, which calls `join`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nanoinfer.config import EngineConfig
from nanoinfer.errors import NanoinferError, RankError
from nanoinfer.models.partition import Partition
from nanoinfer.runner.channel import STEP, Channel, decode_batch
from nanoinfer.runner.openmp import wait_briefly
from nanoinfer.runner.torchrun import Launch, connect, rendezvous

if TYPE_CHECKING:
    import torch

    from nanoinfer.engine.batch import StepHandle
    from nanoinfer.models.weights import WeightSlot
    from nanoinfer.runner.build import DataPlane
    from nanoinfer.runner.worst_step import MemoryMark

LOOK_S = 1.0  # how often a rank that hears nothing looks at its GPU
MAX_IN_FLIGHT = 2  # as many steps as rank 0 has under way: LLMEngine's _max_in_flight, and the one it has just launched


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what Ctrl-C means
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    # Without Python's own tidying up, which with torch takes longer than a second: nothing is left to be tidied.
    os._exit(run(channel))


def join(launch: Launch) -> NoReturn:
    """Serve as the rank that `launch` says until rank 0 ends it, and end this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wait_briefly()
    store = rendezvous()
    code = run(connect(store, launch), launch, store)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without Python's own tidying up, which with graphs of NCCL's kernels may not end


def run(channel: Channel, launch: Launch | None = None, store: Any = None) -> int:
    """Serve until rank 0 ends it; returns the exit code. A failure is reported to rank 0, not printed."""
    threading.Thread(target=_leave_with_rank_0, args=(channel.stream,), daemon=True).start()
    try:
        _serve(channel, launch, store)
    except EOFError:
        return 1
    except Exception as error:
        _report(channel, error)
        return 1
    return 0


def _serve(channel: Channel, launch: Launch | None, store: Any) -> None:
    import torch  # rank 0 is importing it too

    from nanoinfer.runner.process_group import join_ranks, open_store
    from nanoinfer.runner.worst_step import MemoryMark

    channel.send_report(stage="started")
    setup = channel.receive_report()
    torch.set_num_threads(setup["threads"])
    partition = Partition(setup["rank"], setup["size"])
    device, timeout_s, ranks_on_host = torch.device(setup["device"]), setup["timeout_s"], setup["size"]
    if launch is None:
        store = open_store(partition, tuple(setup["store"]), timeout_s)
    else:
        ranks_on_host = launch.ranks_on_host
        if device.type == "cuda":
            device = torch.device("cuda", (device.index or 0) + launch.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before NCCL is there: nothing of this rank may land on the first device
    start = MemoryMark.now(device)
    group = join_ranks(store, partition, device, ranks_on_host=ranks_on_host, timeout_s=timeout_s)
    plane = _build(channel, setup, device, group, start)
    channel.send_report(stage="ready")
    in_flight: deque[StepHandle] = deque()
    while (message := _next_message(channel, in_flight, device))[0] == STEP:
        in_flight.append(plane.runner.launch(decode_batch(message[1])))
        if len(in_flight) > MAX_IN_FLIGHT:
            in_flight.popleft().result()
    # On a GPU the end of the process gives all back at once, where NCCL would wait for graphs to go.
    if device.type != "cuda":
        del plane, in_flight
        group.close()


def _next_message(channel: Channel, in_flight: deque[StepHandle], device: torch.device) -> tuple[int, bytes]:
    """Of rank 0, which may be waiting for a step that has failed on this rank's GPU: then it is raised here.

    Only steps that nobody waits for would not be noticed otherwise.
    """
    if device.type == "cuda":
        import torch

        while in_flight and not select.select([channel.stream], [], [], LOOK_S)[0]:
            torch.cuda.current_stream(device).query()
    return channel.receive()


def _build(channel: Channel, setup: dict[str, Any], device: torch.device, group: Any, start: MemoryMark) -> DataPlane:
    from nanoinfer.loading.folder import read_model_config
    from nanoinfer.loading.weights import fill_weights
    from nanoinfer.runner.build import build_data_plane

    config = EngineConfig.from_options(setup["config"])
    folder = Path(setup["folder"])

    def load(slots: Mapping[str, WeightSlot]) -> None:
        fill_weights(slots, folder, config.load_format, config.seed)
        # No rank goes on alone, and waits for the slowest disk in a collective that has a time limit.
        channel.send_report(stage="loaded")
        channel.receive_report()

    return build_data_plane(config, read_model_config(folder), device, load=load, group=group, start=start)


def _report(channel: Channel, error: Exception) -> None:
    message = str(error) if isinstance(error, NanoinferError) else f"{type(error).__name__}: {error}"
    try:
        channel.send_report(
            error=type(error).__name__,
            message=message,
            is_secondary=isinstance(error, RankError),
            traceback="".join(traceback.format_exception(error)),
        )
    except OSError:  # rank 0 is gone, and nobody is left to tell
        pass


def _leave_with_rank_0(stream: socket.socket) -> None:
    """End this process when rank 0 is gone, whatever it is doing: it may wait for others that wait for rank 0."""
    hung_up = getattr(select, "POLLRDHUP", 0)  # where it exists, POLLHUP does not tell of a TCP peer's end
    poller = select.poll()
    poller.register(stream, hung_up)
    poller.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
