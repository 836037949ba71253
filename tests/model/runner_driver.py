"""A hand-made stand-in for the scheduler: feeds a ModelRunner fixed chunks, so data-plane tests need nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from nanoinfer.attention.torch import TorchAttention
from nanoinfer.config import SamplingParams
from nanoinfer.engine.batch import NewSequence, ScheduledBatch, TokenLogprobs
from nanoinfer.kernels.heads import HeadLayout
from nanoinfer.kernels.kernel_set import EAGER, KernelSet
from nanoinfer.layers.rotary import rotary_table
from nanoinfer.models.config import ModelConfig
from nanoinfer.models.decoder import Decoder
from nanoinfer.runner.model_runner import ModelRunner, allocate_kv_caches

CPU = torch.device("cpu")
torch.set_num_threads(1)  # the models of these tests are so small that a second thread only waits
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def decoder_from_hf(hf_model, dtype=torch.float32, kernels: KernelSet = EAGER) -> Decoder:
    """Our decoder with the weights of a transformers model, copied in memory."""
    config = ModelConfig.from_dict(hf_model.config.to_dict(), source="test")
    decoder = Decoder(config, kernels=kernels, dtype=dtype, device=CPU)
    fill(decoder, hf_model.state_dict())
    return decoder


def fill(decoder: Decoder, tensors: dict[str, torch.Tensor]) -> None:
    slots = decoder.weight_slots()
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and decoder.config.tie_word_embeddings:
            continue
        slot = slots.pop(name)
        assert tuple(tensor.shape) == slot.shape
        slot.target.copy_(tensor)
    assert not slots, sorted(slots)


class Driver:
    """Runs sequences through a ModelRunner; physical blocks are handed out in a shuffled order."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        block_size=16,
        num_blocks=512,
        max_num_seqs=16,
        max_model_len=1024,
        seed=0,
        kernels: KernelSet = EAGER,
    ) -> None:
        config = decoder.config
        caches = allocate_kv_caches(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            decoder.embed_tokens.weight.dtype,
            CPU,
        )
        for cache in caches:  # stale content must never matter
            for tensor in cache:
                tensor.fill_(100.0)
        heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)
        cos_sin = rotary_table(config.rope, config.head_dim, max_model_len, CPU)
        attention = TorchAttention(heads, cos_sin, kernels)
        self.runner = ModelRunner(
            decoder, attention, caches, max_num_seqs=max_num_seqs, max_model_len=max_model_len, device=CPU
        )
        self.block_size = block_size
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.step = 0
        self.logprobs: dict[int, list[TokenLogprobs | None]] = {}

    def generate(
        self,
        prompts: list[list[int]],
        max_new: int,
        *,
        sampling: SamplingParams | list[SamplingParams] = GREEDY,
        chunk: int | None = None,
        prompt_lens: list[int] | None = None,
        seeds: list[int] | None = None,
        stop_token_ids: tuple[int, ...] = (),
    ) -> list[list[int]]:
        """New tokens of each prompt. Prompts are cut into chunks of `chunk`; all sequences advance in every step."""
        params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        prompt_lens = prompt_lens or [len(p) for p in prompts]
        tokens, computed = [list(p) for p in prompts], [0] * len(prompts)
        owned: list[list[int]] = [[] for _ in prompts]
        self.logprobs = {i: [] for i in range(len(prompts))}
        entered: set[int] = set()
        while True:
            live = [i for i, p in enumerate(prompts) if len(tokens[i]) - len(p) < max_new]
            if not live:
                break
            live.sort(key=lambda i: len(tokens[i]) - computed[i] != 1 or i not in entered)  # decodes first
            new, blocks, query_lens, is_sampled = [], [], [], []
            for i in live:
                needed = -(-len(tokens[i]) // self.block_size) - len(owned[i])
                taken = [self.free.pop() for _ in range(needed)]
                owned[i] += taken
                if i in entered:
                    blocks += [(i, block) for block in taken]
                else:
                    new.append(
                        NewSequence(
                            row=i,
                            token_ids=list(tokens[i]),
                            prompt_len=prompt_lens[i],
                            block_table=list(owned[i]),
                            sampling=replace(params[i]),
                            seed=seeds[i] if seeds else (params[i].seed or 0),
                            stop_token_ids=stop_token_ids,
                        )
                    )
                count = min(len(tokens[i]) - computed[i], chunk or len(tokens[i]))
                query_lens.append(count)
                is_sampled.append(computed[i] + count == len(tokens[i]))
            batch = ScheduledBatch(
                step=self.step,
                new_sequences=new,
                new_blocks=blocks,
                rows=live,
                starts=[computed[i] for i in live],
                query_lens=query_lens,
                is_sampled=is_sampled,
                num_decodes=sum(i in entered and len(tokens[i]) - computed[i] == 1 for i in live),
            )
            self.step += 1
            result = self.runner.run(batch)
            entered.update(live)
            sampled = iter(result.token_ids)
            reports = iter(result.logprobs or [None] * len(result.token_ids))
            for i, count, sample in zip(live, query_lens, is_sampled, strict=True):
                computed[i] += count
                if sample:
                    tokens[i].append(next(sampled))
                    self.logprobs[i].append(next(reports))
        for blocks_of in owned:
            self.free += blocks_of
        return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]
