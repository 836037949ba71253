"""`--load-format dummy`: random weights in a model's real shapes, for benchmarks without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from nanoinfer.models.weights import WeightSlot


def fill_with_random_weights(slots: Mapping[str, WeightSlot], *, seed: int) -> None:
    """Normal weights with deviation 0.02 (the usual initialiser_range), norm weights 1, biases 0.

    The values depend only on `seed`, the names' order and the device's type: a rank has its part of the same model.
    """
    import torch

    generators: dict[torch.device, torch.Generator] = {}
    for name, slot in slots.items():
        target = slot.target
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        elif name.endswith(".bias"):
            target.zero_()
        else:
            if target.device not in generators:
                generators[target.device] = torch.Generator(target.device).manual_seed(seed)
            whole = target if slot.shard is None else torch.empty(slot.shape, dtype=target.dtype, device=target.device)
            whole.normal_(0.0, 0.02, generator=generators[target.device])
            if slot.shard is not None:
                dim, start, stop = slot.shard
                target.copy_(whole.narrow(dim, start, stop - start))
