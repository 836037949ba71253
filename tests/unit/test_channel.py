"""Steps arrive as they were sent, whole and in order, and a sender never overtakes what fits."""

from __future__ import annotations

import random
import socket
import threading
from dataclasses import replace

import pytest
from thoroughness import some

from nanoinfer.config import SamplingParams
from nanoinfer.engine.batch import NewSequence, ScheduledBatch
from nanoinfer.runner.channel import STEP, STOP, Channel, decode_batch, encode_batch


def random_batch(rng: random.Random, step: int) -> ScheduledBatch:
    sequences = rng.randrange(1, 40)
    decodes = rng.randrange(sequences + 1)
    others = sequences - decodes

    def ids(count: int, top: int) -> list[int]:
        return rng.choices(range(top), k=count)

    new = []
    for _ in range(rng.randrange(4)):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.1, 1.7]),
            top_k=rng.choice([0, 50]),
            top_p=rng.uniform(0.1, 1.0),
            min_p=rng.random(),
            repetition_penalty=rng.uniform(0.5, 2),
            presence_penalty=rng.uniform(-2, 2),
            frequency_penalty=rng.uniform(-2, 2),
            min_tokens=rng.randrange(9),
            logprobs=rng.choice([None, 0, 20]),
            max_tokens=None,
        )
        length = rng.randrange(1, 2000)
        stops = tuple(ids(rng.randrange(3), 150_000))
        table = ids(length // 16 + 1, 2**31 - 1)
        new.append(
            NewSequence(rng.randrange(256), ids(length, 150_000), length, table, params, rng.getrandbits(62) + 7, stops)
        )
    return ScheduledBatch(
        step=step,
        new_sequences=new,
        new_blocks=[(rng.randrange(256), rng.randrange(2**31)) for _ in range(rng.randrange(5))],
        rows=ids(sequences, 256),
        starts=ids(sequences, 131_072),
        query_lens=[1] * decodes + [rng.randrange(1, 8192) for _ in range(others)],
        is_sampled=[True] * decodes + [rng.random() < 0.5 for _ in range(others)],
        num_decodes=decodes,
    )


def test_batches_arrive_as_they_were_sent_however_far_the_sender_is_ahead() -> None:
    """Megabytes more than a socket holds: the sender has to wait, and nothing may be overwritten or reordered."""
    rng = random.Random(1)
    batches = [random_batch(rng, step) for step in some(range(30))]
    longest = NewSequence(0, [7] * 131_072, 131_072, [3] * 8192, SamplingParams(max_tokens=None), 1, ())
    batches[::3] = [replace(batch, new_sequences=[longest] * 2) for batch in batches[::3]]
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)

    def send() -> None:
        for batch in batches:
            sender.send(STEP, encode_batch(batch))
        sender.send(STOP)

    thread = threading.Thread(target=send)
    thread.start()
    received = []
    while (message := receiver.receive())[0] != STOP:
        received.append(decode_batch(message[1]))
    thread.join()
    assert received == batches
    ours.close()
    with pytest.raises(EOFError):
        receiver.receive()
    theirs.close()


def test_what_only_the_control_plane_needs_stays_there() -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=9, stop="x", ignore_eos=True, stop_token_ids=(4,))
    batch = replace(random_batch(random.Random(2), 0), new_sequences=[NewSequence(0, [1], 1, [2], params, 6, (4,))])
    arrived = decode_batch(encode_batch(batch)).new_sequences[0]
    assert arrived.sampling == SamplingParams(max_tokens=None)
    assert (arrived.seed, arrived.stop_token_ids) == (6, (4,))


def test_reports_travel_the_other_way() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(theirs).send_report(stage="ready", numbers=[1, 2])
        assert Channel(ours).receive_report() == {"stage": "ready", "numbers": [1, 2]}
