"""How far bfloat16 is from float32, with transformers' float32 as the reference: top-1 agreement and logprob distance.

    python benchmarks/agreement_cpu.py [--json FILE]

transformers in float32 continues each prompt greedily by 48 tokens. At each of these positions, given the same tokens
before it, every other candidate says which token is most likely and how likely the reference's token is. Distances are
in natural-log probability; tokens outside nanoinfer's 20 reported ones count as disagreement only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from machine import facts
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoinfer import LLM, SamplingParams
from nanoinfer.loading.builtin import smollm2_folder

NEW = 48
PROMPTS = [
    "The capital of France is",
    "def quicksort(items):\n",
    "Water boils at a lower temperature on a mountain because",
    "Once upon a time, a fox",
    "Dear Sir or Madam,\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "The three laws of motion are",
    "Recipe for a simple tomato soup:\n1.",
]

Position = tuple[int, float | None]  # the most likely token, and the logprob of the reference's token


class Theirs:
    """transformers' model in one dtype."""

    def __init__(self, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def continuation(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def positions(self, prompt: list[int], tokens: list[int]) -> list[Position]:
        logits = self.model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
        logprobs = logits.log_softmax(dim=-1)
        return [(int(row.argmax()), float(row[token])) for row, token in zip(logprobs, tokens, strict=True)]


def our_positions(llm: LLM, prompt: list[int], tokens: list[int]) -> list[Position]:
    prefixes = [prompt + tokens[:i] for i in range(len(tokens))]
    outputs = llm.generate(prefixes, SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, ignore_eos=True))
    found = []
    for output, token in zip(outputs, tokens, strict=True):
        first = output.outputs[0]
        assert first.logprobs is not None
        found.append((first.token_ids[0], dict(first.logprobs[0].top).get(token)))
    return found


def distance(candidate: list[Position], reference: list[Position]) -> dict[str, float]:
    pairs = list(zip(candidate, reference, strict=True))
    apart = [abs(ours[1] - theirs[1]) for ours, theirs in pairs if ours[1] is not None and theirs[1] is not None]
    return {
        "positions": len(pairs),
        "top1_agreement": sum(ours[0] == theirs[0] for ours, theirs in pairs) / len(pairs),
        "mean_logprob_distance": statistics.fmean(apart),
        "max_logprob_distance": max(apart),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    reference = Theirs("float32")
    work = [(prompt, reference.continuation(prompt)) for prompt in prompts]
    expected = [position for each in work for position in reference.positions(*each)]
    result: dict[str, object] = {"machine": facts()}
    narrow = Theirs("bfloat16")
    result["transformers bfloat16"] = distance([p for each in work for p in narrow.positions(*each)], expected)
    for kernels, dtype in (("numba", "float32"), ("numba", "bfloat16"), ("cpu", "bfloat16"), ("eager", "bfloat16")):
        with LLM(str(smollm2_folder()), device="cpu", dtype=dtype, num_blocks=800, kernels=kernels) as llm:
            found = [p for each in work for p in our_positions(llm, *each)]
        result[f"nanoinfer {dtype}, kernels {kernels}"] = distance(found, expected)
    for name, figures in result.items():
        print(name, figures)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
