"""The messages from rank 0 to the other ranks: each step as a few arrays of integers over a stream socket.

The kernel keeps what a rank has not read yet and makes the sender wait when that is much, so messages cannot be
overwritten, lost or reordered. The other direction carries only short reports, as JSON. No torch.
"""

from __future__ import annotations

import json
import socket
import struct
from array import array
from collections.abc import Iterable
from typing import Any

from nanoinfer.config import SamplingParams
from nanoinfer.engine.batch import NewSequence, ScheduledBatch

STEP, REPORT, STOP = 1, 2, 3

_FRAME = struct.Struct("=BI")  # kind, bytes that follow
_BATCH = struct.Struct("=qIIIII")  # step; how many new sequences, new blocks, sequences, decodes, others
# row, prompt_len, seed, how many tokens, blocks, stop ids; then the sampling parameters in the order of _SAMPLING
_SEQUENCE = struct.Struct("=IIqIII" + "6d" + "3q")
_SAMPLING_REALS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_NO_LOGPROBS = -1


class Channel:
    """One end of the stream between rank 0 and another rank; whole messages in, whole messages out."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream

    def send(self, kind: int, payload: bytes = b"") -> None:
        """OSError if the other end is gone, or does not read within the socket's time-out."""
        self.stream.sendall(_FRAME.pack(kind, len(payload)) + payload)

    def send_report(self, **fields: Any) -> None:
        self.send(REPORT, json.dumps(fields).encode())

    def receive(self, most: int | None = None) -> tuple[int, bytes]:
        """(kind, payload) of the next message, waiting for it; EOFError if the other end is gone.

        ValueError if the payload has more than `most` bytes: it may be no message of ours at all.
        """
        kind, size = _FRAME.unpack(self._exactly(_FRAME.size))
        if most is not None and size > most:
            raise ValueError(f"{size} bytes instead of at most {most}")
        return kind, self._exactly(size)

    def receive_report(self, most: int | None = None) -> dict[str, Any]:
        kind, payload = self.receive(most)
        if kind == STOP:
            raise EOFError("stopped")
        if kind != REPORT:
            raise ValueError(f"a message of kind {kind} instead of a report")
        report: dict[str, Any] = json.loads(payload)
        return report

    def _exactly(self, size: int) -> bytes:
        buffer = bytearray(size)
        view, done = memoryview(buffer), 0
        while done < size:
            try:
                count = self.stream.recv_into(view[done:])
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError("the other end is gone")
            done += count
        return bytes(buffer)


def encode_batch(batch: ScheduledBatch) -> bytes:
    """The batch as bytes. Decoding sequences always have one token and sample, so only the others say how many."""
    others = batch.num_decodes
    blocks = array("i")
    for pair in batch.new_blocks:
        blocks.extend(pair)
    parts = [
        _BATCH.pack(
            batch.step,
            len(batch.new_sequences),
            len(batch.new_blocks),
            len(batch.rows),
            others,
            len(batch.rows) - others,
        ),
        blocks.tobytes(),
        array("i", batch.rows).tobytes(),
        array("i", batch.starts).tobytes(),
        array("i", batch.query_lens[others:]).tobytes(),
        bytes(batch.is_sampled[others:]),
    ]
    for sequence in batch.new_sequences:
        parts += _encode_sequence(sequence)
    return b"".join(parts)


def _encode_sequence(sequence: NewSequence) -> Iterable[bytes]:
    params = sequence.sampling
    lists = (sequence.token_ids, sequence.block_table, sequence.stop_token_ids)
    yield _SEQUENCE.pack(
        sequence.row,
        sequence.prompt_len,
        sequence.seed,
        *map(len, lists),
        *(getattr(params, name) for name in _SAMPLING_REALS),
        params.top_k,
        params.min_tokens,
        _NO_LOGPROBS if params.logprobs is None else params.logprobs,
    )
    for values in lists:
        yield array("i", values).tobytes()


def decode_batch(payload: bytes) -> ScheduledBatch:
    """The batch that `encode_batch` was given, with the sampling parameters that concern the data plane."""
    reader = _Reader(payload)
    step, num_new, num_blocks, num_rows, num_decodes, num_others = reader.unpack(_BATCH)
    blocks = reader.integers(2 * num_blocks)
    rows, starts = reader.integers(num_rows), reader.integers(num_rows)
    query_lens = [1] * num_decodes + reader.integers(num_others)
    is_sampled = [True] * num_decodes + [bool(flag) for flag in reader.take(num_others)]
    new_sequences = [_decode_sequence(reader) for _ in range(num_new)]
    return ScheduledBatch(
        step=step,
        new_sequences=new_sequences,
        new_blocks=list(zip(blocks[::2], blocks[1::2], strict=True)),
        rows=rows,
        starts=starts,
        query_lens=query_lens,
        is_sampled=is_sampled,
        num_decodes=num_decodes,
    )


def _decode_sequence(reader: _Reader) -> NewSequence:
    row, prompt_len, seed, tokens, blocks, stops, *params = reader.unpack(_SEQUENCE)
    *reals, top_k, min_tokens, logprobs = params
    return NewSequence(
        row=row,
        prompt_len=prompt_len,
        seed=seed,
        token_ids=reader.integers(tokens),
        block_table=reader.integers(blocks),
        stop_token_ids=tuple(reader.integers(stops)),
        sampling=SamplingParams(
            **dict(zip(_SAMPLING_REALS, reals, strict=True)),
            top_k=top_k,
            min_tokens=min_tokens,
            max_tokens=None,
            logprobs=None if logprobs == _NO_LOGPROBS else logprobs,
        ),
    )


class _Reader:
    """Takes a payload apart from its front."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    def take(self, size: int) -> bytes:
        self._at += size
        return self._payload[self._at - size : self._at]

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))

    def integers(self, count: int) -> list[int]:
        values = array("i")
        values.frombytes(self.take(4 * count))
        return values.tolist()
