"""The rows of the GPU table in docs/performance.md, measured through the public API with random weights.

    python benchmarks/gpu.py [--parts check,bench256,decode,prefill,start] [--shape 0.6b|8b] [--out FILE] [LLM OPTIONS]

Every result is one JSON line with its raw samples; `--set name=value` passes an engine option (attention=torch).
Workloads are those of nano-vllm's bench.py and vLLM's usual figures: bench256 is 256 prompts and outputs of 100 to
1024 tokens at temperature 0.6; decode b/p is b prompts of p ids, TPOT = (t(n) - t(1)) / (n - 1).
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from machine import facts

from nanoinfer import LLM, SamplingParams

SHAPES = {
    "0.6b": {},
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}
MATCHES = 16  # tokens of the greedy comparison


def model_folder(shape: str) -> str:
    """A folder with the config.json of a Qwen3 shape, for random weights."""
    import nanoinfer

    base = Path(nanoinfer.__file__).parent / "loading" / "shapes" / "qwen3-0.6b" / "config.json"
    folder = Path(tempfile.gettempdir()) / f"nanoinfer-bench-{shape}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(json.loads(base.read_text()) | SHAPES[shape]))
    return str(folder)


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = model_folder(options.shape)
        self.results: list[dict[str, Any]] = []

    def emit(self, **result: Any) -> None:
        self.results.append(result)
        print(json.dumps(result), flush=True)

    def open(self, **options: Any) -> LLM:
        defaults: dict[str, Any] = {"load_format": "dummy", "max_model_len": 4096}
        return LLM(self.folder, **(defaults | self.options.engine | options))

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(10_000) for _ in range(length)] for _ in range(count)]

    def seconds(self, llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> float:
        started = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - started

    # -- parts -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Greedy tokens of the fast engine against the plain one (torch attention, eager kernels, no graphs)."""
        prompts = [*self.prompts(5, 300, seed=9), *self.prompts(4, 17, seed=8)]
        params = SamplingParams(temperature=0.0, max_tokens=MATCHES, ignore_eos=True, logprobs=0)
        runs = []
        for options in (
            {"attention": "torch", "kernels": "eager", "enforce_eager": True, "num_blocks": 2000},
            {"num_blocks": 2000},
        ):
            with self.open(**options) as llm:
                runs.append([output.outputs[0] for output in llm.generate(prompts, params)])
                if not options.get("enforce_eager"):
                    plain = SamplingParams(temperature=0.0, max_tokens=MATCHES, ignore_eos=True)
                    again = [output.outputs[0].token_ids for output in llm.generate(prompts, plain)]
                    self.emit(
                        part="check",
                        what="fused sampling equals sampling from logits",
                        equal=sum(a == b.token_ids for a, b in zip(again, runs[1], strict=True)),
                        of=len(prompts),
                    )
        with self.open(num_blocks=2000, max_prefill_chunk=64) as llm:  # chunks beside decodes, in graphs
            plain = SamplingParams(temperature=0.0, max_tokens=MATCHES, ignore_eos=True)
            llm.generate(prompts, plain)
            llm.reset_prefix_cache()
            subscription = llm.events.subscribe()
            mixed = [output.outputs[0].token_ids for output in llm.generate(prompts, plain)]
            graphs = [event.used_graph for event in subscription.drain() if event.kind == "mixed"]
            equal = sum(
                a == b for ids, run in zip(mixed, runs[0], strict=True) for a, b in zip(ids, run.token_ids, strict=True)
            )
            self.emit(part="check", what="greedy tokens of mixed steps under graphs equal to the plain engine's",
                      equal=equal, of=MATCHES * len(prompts), mixed_steps=len(graphs), graphs=sum(graphs))  # fmt: skip
        agree = [
            next((i for i, (a, b) in enumerate(zip(x.token_ids, y.token_ids, strict=True)) if a != b), MATCHES)
            for x, y in zip(*runs, strict=True)
        ]
        distance = max(
            abs(a.logprob - b.logprob)
            for x, y, n in zip(*runs, agree, strict=True)
            for a, b in list(zip(x.logprobs or [], y.logprobs or [], strict=True))[:n]
        )
        self.emit(part="check", what="greedy tokens equal to the plain engine's", equal=agree, of=MATCHES)
        self.emit(part="check", what="largest logprob difference on equal tokens", value=distance)
        self.each_position(prompts, [run.token_ids for run in runs[0]])

    def each_position(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        """Free answers part for good where two tokens are nearly equal. So each position once more by itself.

        Behind a prompt and the plain engine's answer up to there, one token by prefill and the next by a decode, of 32
        and of more than 200 sequences.
        """
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        places = [
            (prompt, answer, i) for prompt, answer in zip(prompts, answers, strict=True) for i in range(MATCHES - 1)
        ]
        for sequences in (32, 256):
            asked = places * (1 if sequences == 32 else 2)
            with self.open(num_blocks=4000, max_num_seqs=sequences) as llm:
                outputs = llm.generate([prompt + answer[:i] for prompt, answer, i in asked], params)
            pairs = [
                (output.outputs[0].token_ids, answer[i : i + 2])
                for output, (_, answer, i) in zip(outputs, asked, strict=True)
            ]
            reached = [(ours, plain) for ours, plain in pairs if ours[0] == plain[0]]
            equal = sum(ours[1] == plain[1] for ours, plain in reached)
            for how, count, of in (("prefill", len(reached), len(pairs)), ("decode", equal, len(reached))):
                what = f"by {how}, up to {sequences} at once, equal to the plain engine's"
                self.emit(part="check", what=what, equal=count, of=of)

    def bench256(self) -> None:
        with self.open(max_num_seqs=256) as llm:
            self.bench256_rows(llm)

    def bench256_rows(self, llm: LLM) -> None:
        random.seed(0)
        prompts = [[random.randint(0, 10_000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=random.randint(100, 1024)) for _ in range(256)
        ]
        tokens = sum(p.max_tokens or 0 for p in params)
        # Once with other prompts: kernels are compiled and graphs captured, as the peers do at their start.
        self.seconds(llm, [[id_ + 1 for id_ in prompt] for prompt in prompts], params)
        samples, splits = [], []
        for _ in range(self.options.repeat):
            llm.reset_prefix_cache()
            subscription = llm.events.subscribe()
            samples.append(tokens / self.seconds(llm, prompts, params))
            events = subscription.drain()
            llm.events.unsubscribe(subscription)
            decodes = [event for event in events if event.kind == "decode" and event.running > 200]
            splits.append(
                {
                    "steps": len(events),
                    "preemptions": sum(event.preemptions for event in events),
                    "schedule_ms": statistics.median(event.schedule_ms for event in events),
                    "decode_device_ms": statistics.median([e.device_ms for e in decodes] or [0]),
                    "decode_interval_ms": statistics.median(
                        [b.time - a.time for a, b in itertools.pairwise(decodes)] or [0]
                    )
                    * 1e3,
                    "device_s": sum(event.device_ms for event in events) / 1e3,
                }
            )
        self.emit(part="bench256", unit="output tok/s", median=statistics.median(samples), samples=samples,
                  prompt_tokens=sum(map(len, prompts)), output_tokens=tokens, splits=splits,
                  engine=str(llm.info))  # fmt: skip

    def decode(self) -> None:
        with self.open(max_num_seqs=256) as llm:
            self.decode_rows(llm)

    def decode_rows(self, llm: LLM) -> None:
        for batch, length, count in ((1, 128, 513), (32, 128, 513)):
            one = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
            many = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count)
            for warm_up in (98, 99):  # the second step of a size is the one that captures its graph
                llm.reset_prefix_cache()
                self.seconds(llm, self.prompts(batch, length, seed=warm_up), many)
            first, tpot = [], []
            for i in range(self.options.repeat):
                llm.reset_prefix_cache()
                first.append(self.seconds(llm, self.prompts(batch, length, seed=2 * i), one))
                total = self.seconds(llm, self.prompts(batch, length, seed=2 * i + 1), many)
                tpot.append((total - first[-1]) / (count - 1) * 1e3)
            self.emit(part=f"decode {batch}/{length}", unit="TPOT ms", median=statistics.median(tpot), samples=tpot)
            self.emit(part=f"ttft {batch}/{length}", unit="ms", median=statistics.median(first) * 1e3,
                      samples=[x * 1e3 for x in first])  # fmt: skip

    def prefill(self) -> None:
        with self.open(max_model_len=16_400, max_num_batched_tokens=16_384) as llm:
            self.prefill_rows(llm, ((8, 4000), (1, 16_384)))

    def prefill_rows(self, llm: LLM, cases: tuple[tuple[int, int], ...]) -> None:
        one = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
        for count, length in cases:
            self.seconds(llm, self.prompts(count, length, seed=50), one)
            samples = []
            for i in range(self.options.repeat):
                llm.reset_prefix_cache()
                samples.append(count * length / self.seconds(llm, self.prompts(count, length, seed=60 + i), one))
            self.emit(part=f"prefill {count}x{length}", unit="tok/s", median=statistics.median(samples),
                      samples=samples)  # fmt: skip

    def start(self) -> None:
        """Process start to first token, kernel caches empty and then filled; Python's bytecode as pip leaves it."""
        options = {"load_format": "dummy", "max_model_len": 4096} | self.options.engine
        code = (
            "import sys, time; from nanoinfer import LLM, SamplingParams\n"
            f"llm = LLM({self.folder!r}, **{options!r})\n"
            "llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0))\n"
        )
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPYCACHEPREFIX": f"{cache}/bytecode"}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            for kind in ("with no caches at all", "cold", "warm", "warm", "warm"):
                if kind == "cold":
                    environment["TRITON_CACHE_DIR"] = f"{cache}/cold"
                started = time.perf_counter()
                subprocess.run([sys.executable, "-c", code], env=environment, check=True)
                self.emit(part=f"start {kind}", unit="s", value=time.perf_counter() - started)


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings")


def engine_options(settings: list[str]) -> dict[str, Any]:
    """The engine options of NAME=VALUE, values being Python literals or else plain words."""
    options: dict[str, Any] = {}
    for setting in settings:
        name, value = setting.split("=", 1)
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="check,bench256,decode,prefill,start")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    add_settings(parser)
    options = parser.parse_args()
    options.engine = engine_options(options.settings)
    bench = Bench(options)
    bench.emit(part="machine", **facts())
    for part in options.parts.split(","):
        started = time.perf_counter()
        try:
            getattr(bench, part)()
        except Exception:  # one broken part must not lose the others' results
            bench.emit(part=part, error=traceback.format_exc()[-1500:])
        print(f"# {part}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    if options.out:
        options.out.write_text(json.dumps(bench.results, indent=1) + "\n")


if __name__ == "__main__":
    main()
