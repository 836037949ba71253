"""What more GPUs would give: a model of a step's time, fitted to measurements with one and two ranks.

    python benchmarks/expected_gpus.py FILE[:SHAPE[:TP]] ... [--tp 1,2,4,8]

FILE is what tensor_parallel_gpu.py or gpu.py has written; SHAPE and TP stand for rows that do not say so themselves.
Prints a Markdown table, then the error against each measured row. With n ranks, times in seconds:

* A decode step of b sequences over c tokens of context in all:
      max(W / n / bandwidth, 2 P b / n / product) + c K / n / bandwidth + layers * fixed + exchanges
  W: bytes of the weights that a token reads (layers and LM head); P: their number; K: bytes of keys and values of a
  token in all layers; fixed: what a layer costs beside that (launches, small kernels, products that do not reach the
  memory's speed), one constant for b = 1 and one for more.
* A prefill of T tokens in prompts of length p:
      2 P' T / n / product + 2 p T heads head_dim layers / n / attention + exchanges of steps of up to 16,384 tokens
  P': parameters of the layers alone. Attention is causal: 4 p^2 / 2 operations for each head dimension of a prompt.
* Exchanges of a step of t tokens: two sums in each layer and one for the embedding, each of t * hidden * 2 bytes:
      latency * (1 + log2 n) / 2 + bytes * 2 (n - 1) / n / link
  and one latency for the choice of tokens. Where FILE has a sweep of all-reduces with two ranks, it is taken instead,
  interpolated, and multiplied for more ranks by what the formula says. That latency grows with log2 n is an assumption.
* bench256 is its prefill and then one decode step after the other, each of those sequences that are not done.

The constants are found by least squares on the logarithms, so that each row counts by its relative error.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BYTES = 2  # of a weight, a key or an activation: bfloat16
STEP_TOKENS = 16_384
DECODE_CONTEXT = 128 + 512 / 2  # tokens that a sequence of the rows decode b/128 has on average
WORKLOADS = ("decode 1/128", "decode 32/128", "bench256", "prefill 8x4000")
UNITS = {"decode 1/128": "ms", "decode 32/128": "ms", "bench256": "tok/s", "prefill 8x4000": "tok/s"}
PRIOR = 1e-3  # how much a constant is held at its start: only to decide those that no row depends on


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def read_parameters(self) -> int:
        return self.layer_parameters + self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES

    @property
    def sums(self) -> int:
        return 2 * self.layers + 1


SHAPES = {
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936),
    "8b": Shape(4096, 36, 32, 8, 128, 12_288, 151_936),
}


@dataclass(frozen=True)
class Constants:
    """Per second, or seconds. The defaults are where the search starts."""

    bandwidth: float = 4e12
    product: float = 650e12
    attention: float = 300e12
    fixed_one: float = 8e-6
    fixed_many: float = 15e-6
    latency: float = 10e-6
    link: float = 150e9


Numbers = Any  # a float, or an array of them
Sweep = Sequence[tuple[float, float]]  # (bytes, seconds) of all-reduces with two ranks, ascending


@dataclass(frozen=True)
class Model:
    constants: Constants
    sweep: Sweep = ()

    def all_reduce(self, ranks: int, size: Numbers) -> Numbers:
        if ranks == 1:
            return 0.0 * size
        if not self.sweep:
            return self.formula(ranks, size)
        sizes, seconds = np.log(np.array(self.sweep)).T
        measured = np.exp(np.interp(np.log(size), sizes, seconds))
        measured = measured * np.maximum(1, size / self.sweep[-1][0])  # beyond the sweep time grows with the size
        return measured * self.formula(ranks, size) / self.formula(2, size)

    def formula(self, ranks: int, size: Numbers) -> Numbers:
        c = self.constants
        return c.latency * (1 + math.log2(ranks)) / 2 + size * 2 * (ranks - 1) / ranks / c.link

    def _exchanges(self, shape: Shape, ranks: int, tokens: Numbers, sequences: Numbers) -> Numbers:
        sums = shape.sums * self.all_reduce(ranks, tokens * shape.hidden * BYTES)
        return sums + self.all_reduce(ranks, 8 * sequences)

    def decode_step(self, shape: Shape, ranks: int, batch: Numbers, context: Numbers) -> Numbers:
        """Seconds of one step, or of each of many; `context` counts the tokens of all sequences together."""
        c = self.constants
        read = shape.read_parameters * BYTES / c.bandwidth
        computed = 2 * shape.read_parameters * batch / c.product
        keys = context * shape.kv_bytes / c.bandwidth
        fixed = shape.layers * np.where(batch == 1, c.fixed_one, c.fixed_many)
        return (np.maximum(read, computed) + keys) / ranks + fixed + self._exchanges(shape, ranks, batch, batch)

    def prefill(self, shape: Shape, ranks: int, lengths: Sequence[int]) -> float:
        c, tokens = self.constants, sum(lengths)
        products = 2 * shape.layer_parameters * tokens / c.product
        pairs = 2 * sum(n * n for n in lengths) * shape.heads * shape.head_dim * shape.layers
        steps = math.ceil(tokens / STEP_TOKENS)
        exchanges = steps * self._exchanges(shape, ranks, tokens / steps, len(lengths))
        return (products + pairs / c.attention) / ranks + exchanges

    def bench256(self, shape: Shape, ranks: int) -> float:
        steps = self.decode_step(shape, ranks, *bench256_steps())
        return self.prefill(shape, ranks, bench256_lengths()[0]) + float(np.sum(steps))

    def predict(self, workload: str, shape: Shape, ranks: int) -> float:
        """In the workload's unit: TPOT in ms, or tokens per second."""
        if workload == "bench256":
            return sum(bench256_lengths()[1]) / self.bench256(shape, ranks)
        if workload == "prefill 8x4000":
            return 32_000 / self.prefill(shape, ranks, [4000] * 8)
        batch = 1 if workload == "decode 1/128" else 32
        return float(self.decode_step(shape, ranks, batch, batch * DECODE_CONTEXT)) * 1e3


@cache
def bench256_lengths() -> tuple[list[int], list[int]]:
    """(prompt lengths, output lengths), drawn as the benchmark draws them."""
    rng = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(rng.randint(100, 1024))
        for _ in range(prompts[-1]):
            rng.randint(0, 10_000)
    return prompts, [rng.randint(100, 1024) for _ in range(256)]


@cache
def bench256_steps() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(sequences, tokens of context) of each decode step: the prefill gives the first token, and at step i those
    decode that are not done, over prompt + i tokens each."""
    prompts, outputs = (np.array(lengths) for lengths in bench256_lengths())
    running = outputs[None, :] > np.arange(1, outputs.max())[:, None]
    batch = running.sum(axis=1).astype(float)
    return batch, running @ prompts + batch * np.arange(1, outputs.max())


# -- fitting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A measurement. `workload` may also be "allreduce": bytes of a sum, and its seconds."""

    workload: str
    shape: str
    ranks: int
    value: float
    size: float = 0.0

    def predicted(self, model: Model) -> float:
        if self.workload == "allreduce":
            return model.formula(self.ranks, self.size)
        return model.predict(self.workload, SHAPES[self.shape], self.ranks)


def sweep_of(rows: Sequence[Row]) -> Sweep:
    return sorted((row.size, row.value) for row in rows if row.workload == "allreduce" and row.ranks == 2)


def fit(rows: Sequence[Row], rounds: int = 40) -> Model:
    """Levenberg-Marquardt over the logarithms of the constants, which keeps them positive."""
    start, sweep = np.log(np.array(list(vars(Constants()).values()))), sweep_of(rows)
    measured = np.log([row.value for row in rows])
    # A sweep has many rows; together they count as much as four others.
    weights = np.array([math.sqrt(4 / len(sweep)) if row.workload == "allreduce" else 1.0 for row in rows])

    def model(x: NDArray[np.float64]) -> Model:
        return Model(Constants(*np.exp(x).tolist()), sweep)

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        guess = model(x)
        errors = weights * (np.log([row.predicted(guess) for row in rows]) - measured)
        return np.concatenate([errors, PRIOR * (x - start)])

    x, damping = start, 1e-2
    now = residuals(x)
    for _ in range(rounds):
        slopes = np.stack([(residuals(x + step) - now) / 1e-5 for step in np.eye(len(x)) * 1e-5], axis=1)
        moved = x - np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(x)), slopes.T @ now)
        then = residuals(np.clip(moved, start - 4, start + 4))
        if then @ then < now @ now:
            x, now, damping = np.clip(moved, start - 4, start + 4), then, max(damping / 5, 1e-9)
        else:
            damping *= 4
    return model(x)


# -- files and tables ------------------------------------------------------------------------------------------------


def read_rows(results: Sequence[dict[str, Any]], shape: str = "0.6b", ranks: int = 1) -> list[Row]:
    """The rows that the model knows; `shape` and `ranks` are those of results that do not say so."""
    rows = []
    for result in results:
        part, size = result.get("part"), int(result.get("tp", ranks))
        if part in WORKLOADS and "median" in result:
            rows.append(Row(part, result.get("shape", shape), size, float(result["median"])))
        elif part == "allreduce" and result.get("what") == "all_reduce" and result.get("via", "engine") == "engine":
            rows.append(Row(part, "", size, result["us"] / 1e6, float(result["bytes"])))
    return rows


def table(model: Model, rows: Sequence[Row], sizes: Sequence[int]) -> str:
    measured = {(row.workload, row.shape, row.ranks): row.value for row in rows}
    lines = [
        "| shape | work | " + " | ".join(f"tp {n}" for n in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for name, shape in SHAPES.items():
        for workload in WORKLOADS:
            cells = []
            for n in sizes:
                cell = _number(model.predict(workload, shape, n))
                if (workload, name, n) in measured:
                    cell += f" (measured {_number(measured[workload, name, n])})"
                cells.append(cell)
            lines.append(f"| {name} | {workload}, {UNITS[workload]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE[:SHAPE[:TP]]")
    parser.add_argument("--tp", default="1,2,4,8")
    options = parser.parse_args()
    rows: list[Row] = []
    for argument in options.files:
        name, _, rest = argument.partition(":")
        shape, _, ranks = rest.partition(":")
        rows += read_rows(json.loads(Path(name).read_text()), shape or "0.6b", int(ranks or 1))
    if not any(row.workload in WORKLOADS for row in rows):
        sys.exit("these files have no row that the model knows")
    model = fit(rows)
    print(table(model, rows, [int(size) for size in options.tp.split(",")]))
    print("\nconstants:", ", ".join(f"{name} {value:.3g}" for name, value in vars(model.constants).items()))
    errors = {row: row.predicted(model) / row.value - 1 for row in rows if row.workload in WORKLOADS}
    for row, error in errors.items():
        print(f"{row.shape} {row.workload} tp {row.ranks}: {100 * error:+.1f} %")
    print(f"largest error {100 * max(map(abs, errors.values())):.1f} % (target 15 %)")


if __name__ == "__main__":
    main()
