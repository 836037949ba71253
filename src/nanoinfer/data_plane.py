"""Where an engine's data plane is: in this process, or with tensor parallelism in one process per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from nanoinfer.config import EngineConfig
    from nanoinfer.engine.batch import Executor
    from nanoinfer.loading import Notify
    from nanoinfer.models.config import ModelConfig
    from nanoinfer.runner.build import DataPlane


def open_data_plane(
    config: EngineConfig, model_config: ModelConfig, folder: Path, notify: Notify
) -> tuple[DataPlane, Executor]:
    """What runs the steps, and what was decided on the way to it. Errors as in `build_data_plane`."""
    if config.tensor_parallel_size > 1:
        return _open_on_ranks(config, model_config, folder, notify)
    from nanoinfer.loading.weights import fill_weights
    from nanoinfer.runner.build import build_data_plane, resolve_device
    from nanoinfer.runner.executor import LocalExecutor

    plane = build_data_plane(
        config,
        model_config,
        resolve_device(config.device),
        load=lambda slots: fill_weights(slots, folder, config.load_format, config.seed, notify),
        on_wait=lambda what: notify(what, 0, 0),
    )
    return plane, LocalExecutor(plane.runner)


def _open_on_ranks(
    config: EngineConfig, model_config: ModelConfig, folder: Path, notify: Notify
) -> tuple[DataPlane, Executor]:
    """The other ranks are started before this process imports torch: both take seconds, at the same time."""
    from nanoinfer.loading.weights import fill_weights
    from nanoinfer.models.partition import check_splits
    from nanoinfer.runner.ranks import Ranks
    from nanoinfer.runner.torchrun import Launch, accept, rendezvous

    check_splits(model_config, config.tensor_parallel_size)
    launch, store = Launch.from_environment(), None
    if launch is None:
        ranks = Ranks.start(config.tensor_parallel_size)
    else:
        launch.check(config.tensor_parallel_size)
        if launch.rank > 0:
            from nanoinfer.worker import join

            join(launch)
        store = rendezvous()
        ranks = accept(store, launch, config.tp_timeout)
    try:
        from nanoinfer.runner.build import resolve_device
        from nanoinfer.runner.parallel import build_parallel

        def notify_and_check(stage: str, done: int, total: int) -> None:
            notify(stage, done, total)
            ranks.check()

        return build_parallel(
            config,
            model_config,
            resolve_device(config.device),
            ranks,
            store,
            folder=folder,
            launch=launch,
            load=lambda slots: fill_weights(slots, folder, config.load_format, config.seed, notify_and_check),
        )
    except BaseException:
        ranks.kill()
        raise
