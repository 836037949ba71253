"""Whatever happens to a rank, the caller gets one clear error within seconds, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoinfer import LLM, ConfigError, EngineError, SamplingParams
from nanoinfer.runner import ranks

HERE = Path(__file__).parent
PROMPTLY_S = 10.0  # the longest that a failure may stay untold
PATIENCE_S = 100.0  # for what takes a second, on however busy a machine
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


class Log:
    """What the faulty ranks have noted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def wait_for(self, what: str, times: int = 1) -> int:
        """The process id of the rank that noted `what`, when it has done so `times` times."""
        return int(until(lambda: [pid for name, pid in self.lines() if name == what][times - 1 :], f"no {what}")[0])

    def assert_all_gone(self) -> None:
        pids = {int(pid) for _, pid in self.lines()}
        assert pids
        until(lambda: not any(map(is_running, pids)), f"of {pids} some still run")


def until(condition: Callable[[], Any], message: str, seconds: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(0.02)
    return value


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setenv("NANOINFER_TEST_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(ranks, "WORKER_COMMAND", [sys.executable, str(HERE / "faulty_worker.py")])
    return Log(tmp_path / "log")


def start(model: Path, **options: Any) -> LLM:
    # Without numba, whose import costs as much as all the rest of a start.
    common = {"load_format": "dummy", "device": "cpu", "kernels": "cpu", "num_blocks": 64, "tensor_parallel_size": 2}
    return LLM(str(model), **common, **options)


FAILURES = [
    ("raise", r"rank 1 failed: ValueError: a bug in rank 1"),
    ("memory", r"rank 1 failed: RuntimeError: .*(memory|storage)"),
    ("exit", r"rank 1 \(process \d+\) ended with exit code 7"),
    ("kill", r"rank 1 \(process \d+\) was ended by SIGKILL, perhaps because memory ran out"),
    ("hang", r"rank 1 did not answer in time \(--tp-timeout\)"),
]


@pytest.mark.parametrize(("fault", "message"), FAILURES, ids=[fault for fault, _ in FAILURES])
def test_a_rank_fails_in_a_step(model: Path, log: Log, monkeypatch: pytest.MonkeyPatch, fault: str, message: str):
    monkeypatch.setenv("NANOINFER_TEST_FAULT", fault)
    with start(model, tp_timeout=1.5 if fault == "hang" else 1000) as llm:  # nothing else ends by the time-out
        began = time.monotonic()
        with pytest.raises(EngineError, match=message):
            llm.generate([[1, 2, 3]], LONG)
        assert time.monotonic() - began < PROMPTLY_S
        log.assert_all_gone()
        with pytest.raises(EngineError, match=message):  # not a hang, and not another error
            llm.generate([[1, 2, 3]], LONG)
        assert llm.check_integrity() == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [("start-exit", "ended with exit code 7"), ("load-raise", "a bug in rank 1"), ("load-kill", "SIGKILL")],
)
def test_a_rank_fails_before_the_first_step(
    model: Path, log: Log, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
):
    monkeypatch.setenv("NANOINFER_TEST_FAULT", fault)
    with pytest.raises(EngineError, match=message):
        start(model)
    log.assert_all_gone()


def test_a_rank_dies_while_nothing_runs(model: Path, log: Log):
    with start(model) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        os.kill(log.wait_for("decode"), signal.SIGKILL)
        log.assert_all_gone()
        with pytest.raises(EngineError, match="SIGKILL"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))


def test_a_failure_of_rank_0_ends_the_others(model: Path, log: Log):
    with start(model) as llm:
        run = llm._executor._runner.run

        def failing(batch: Any) -> Any:
            if batch.num_decodes:
                raise ValueError("a bug in rank 0")
            return run(batch)

        llm._executor._runner.run = failing
        with pytest.raises(EngineError, match="a step failed on the device: ValueError: a bug in rank 0"):
            llm.generate([[1, 2, 3]], LONG)
        log.assert_all_gone()


def test_an_interrupted_step_is_finished_on_all_ranks(model: Path, log: Log, monkeypatch: pytest.MonkeyPatch):
    """KeyboardInterrupt in the middle of a step would leave the other ranks one exchange ahead."""
    monkeypatch.setenv("NANOINFER_TEST_FAULT", "slow")
    with start(model) as llm:
        run = llm._executor._runner.run

        def interrupting(batch: Any) -> Any:
            if batch.num_decodes:
                signal.raise_signal(signal.SIGINT)
            return run(batch)

        llm._executor._runner.run = interrupting
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3]], LONG)
        llm._executor._runner.run = run
        again = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        assert [len(output.outputs[0].token_ids) for output in again] == [3, 3]


def test_a_second_ctrl_c_ends_a_step_that_hangs(model: Path, log: Log, monkeypatch: pytest.MonkeyPatch):
    """The main thread waits in a collective, where Python runs no signal handler."""
    monkeypatch.setenv("NANOINFER_TEST_FAULT", "hang")
    code = "import os, signal, time\nfor _ in range(2): time.sleep(0.5); os.kill(os.getppid(), signal.SIGINT)\n"
    with start(model, tp_timeout=1000) as llm:
        began = time.monotonic()
        helper = None
        try:
            run = llm._executor._runner.run
            calls = []

            def running(batch: Any) -> Any:
                nonlocal helper
                calls.append(batch)
                if len(calls) == 6:
                    helper = subprocess.Popen([sys.executable, "-c", code])
                return run(batch)

            llm._executor._runner.run = running
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[1, 2, 3]], LONG)
        finally:
            if helper is not None:
                helper.wait()
        assert time.monotonic() - began < PATIENCE_S
        log.assert_all_gone()


def test_two_engines_at_once_and_many_one_after_the_other(model: Path):
    """Fixed ports and names of shared memory made the second engine on a host fail. Nothing may pile up either."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    before, results = None, []
    for _ in range(10):
        with start(model) as first, start(model) as second:
            results += [llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids for llm in (first, second)]
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        assert children == ""
        before = before or descriptors()
        assert descriptors() <= before
    assert all(result == results[0] for result in results)


def test_more_gpus_than_there_are(model: Path, monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but torch sees 1 CUDA device; use a smaller"):
        LLM(str(model), load_format="dummy", device="cuda", tensor_parallel_size=2)


# -- the program -----------------------------------------------------------------------------------------------------


class Program:
    """`nanoinfer generate --tp 2` of four prompts on the tiny model, in a process group of its own like a shell's."""

    def __init__(self, model: Path, log: Log, fault: str, *, step: int = 6, tokens: int = 300) -> None:
        (model / "in.jsonl").write_text(
            "".join(f'{{"prompt": [1, {i}], "max_tokens": {t}}}\n' for i, t in enumerate([2, 2, tokens, tokens]))
        )
        self.out, self._log = model / "out.jsonl", log
        environment = os.environ | {"NANOINFER_TEST_FAULT": fault, "NANOINFER_TEST_STEP": str(step)}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "faulty_main.py"), "generate", "-m", str(model), "--load-format", "dummy",
             "--device", "cpu", "--kernels", "cpu", "--tp", "2",
             "--num-blocks", "64", "-f", str(model / "in.jsonl"), "-o", str(self.out)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip

    def interrupt(self) -> None:
        """As Ctrl-C at the terminal does: to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self, seconds: float = PATIENCE_S) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=seconds)
        self._log.assert_all_gone()
        assert "Traceback" not in errors
        return self.process.returncode, errors


def test_the_program_keeps_its_results_when_a_rank_is_killed(model: Path, log: Log):
    program = Program(model, log, "kill", step=10)
    log.wait_for("decode", times=8)
    code, errors = program.finish()
    assert code == 1
    assert errors.count("SIGKILL") == 1
    partial = Path(f"{program.out}.partial").read_text().splitlines()
    assert sum('"finish_reason": "length"' in line or '"finish_reason":"length"' in line for line in partial) == 2


@pytest.mark.parametrize("phase", ["load", "prefill", "decode"])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(model: Path, log: Log, phase: str, times: int):
    program = Program(model, log, "slow-load" if phase == "load" else "slow")
    log.wait_for(phase)
    for i in range(times):
        time.sleep(0.05 * i)
        program.interrupt()
    code, _ = program.finish()
    # A shell sees 130 either way: the second may come when the interpreter is ending and die of the signal itself.
    assert code in ((130,) if times == 1 else (130, -signal.SIGINT))


def test_killed_parents_leave_no_ranks(model: Path, log: Log):
    program = Program(model, log, "hang")
    log.wait_for("decode", times=5)
    program.process.kill()
    program.process.communicate()
    log.assert_all_gone()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def torchrun_bench(model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        *TORCHRUN, "-m", "nanoinfer", "bench", "-m", str(model), "--load-format", "dummy", "--device", "cpu",
        "--kernels", "cpu", "--num-blocks", "64", "--num-prompts", "2", "--input-len", "5", "--output-len", "4",
        "--json", *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


def test_ranks_that_torchrun_starts(model: Path):
    """Over TCP and the environment's own rendezvous, as between hosts; the others leave the command line to rank 0."""
    result = torchrun_bench(model, "--tp", "2")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["completed"] == 2


def test_torchrun_without_tp(model: Path):
    """The other process waited for rank 0 long after that had ended."""
    result = torchrun_bench(model)
    assert result.returncode != 0
    assert "2 processes were started together, but --tp is 1; use --tp 2." in result.stderr


def test_a_program_that_torchrun_starts(model: Path, tmp_path: Path):
    """The other ranks' processes serve, and end, where they would have had their LLM."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from nanoinfer import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], load_format='dummy', device='cpu', kernels='cpu', num_blocks=64,\n"
        "         tensor_parallel_size=2) as llm:\n"
        "    [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))\n"
        "print(len(output.outputs[0].token_ids))\n"
    )
    result = subprocess.run([*TORCHRUN, program, model], capture_output=True, text=True, timeout=250)
    assert (result.returncode, result.stdout) == (0, "3\n"), result.stderr


def test_nothing_is_in_shared_memory_and_no_port_is_open_to_the_network(model: Path, log: Log):
    """Full /dev/shm, or a port in use, can then not matter."""
    before = set(os.listdir("/dev/shm"))
    with start(model) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        assert set(os.listdir("/dev/shm")) <= before
        worker = log.wait_for("decode")
        for pid in (os.getpid(), worker):
            assert listening_addresses(pid) <= {"0100007F"}  # 127.0.0.1


def listening_addresses(pid: int) -> set[str]:
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.add(fields[1].partition(":")[0])
    return listening
