"""The program as a whole: help, versions, exit codes, environment, configuration file, start-up time and pipes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from fake_llm import FakeLLM
from program import Program, Result

from nanoinfer.config import EngineConfig

COMMANDS = ("chat", "generate", "bench", "inspect-cache")
HERE = Path(__file__).parent


def run(*arguments: str, stdin: str = "", code: str = "") -> Result:
    """`nanoinfer` as a real process; `code` runs after the program in the same interpreter."""
    script = f"import sys, nanoinfer.cli.app as a\ntry: a.main({list(arguments)!r})\nfinally: {code or 'pass'}"
    done = subprocess.run([sys.executable, "-c", script], input=stdin, capture_output=True, text=True, timeout=60)
    return Result(done.returncode, done.stdout, done.stderr)


def test_help_lists_the_commands(nanoinfer: Program) -> None:
    result = nanoinfer("--help")
    assert result.code == 0
    assert all(command in result.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_panels_and_fits_80_columns(nanoinfer: Program, command: str) -> None:
    result = nanoinfer(command, "--help")
    assert result.code == 0
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    for panel in ("Options:", "Model:", "Engine:", "Display and logs:"):
        assert panel in lines
    for option in ("-tp, --tensor-parallel-size, --tp", "--max-num-batched-tokens", "--enable-prefix-caching"):
        assert option in result.out


def test_version_names_what_matters_on_one_screen() -> None:
    done = subprocess.run([sys.executable, "-m", "nanoinfer", "--version"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert names[0] == "nanoinfer"
    assert {"python", "torch", "triton", "flash-attn", "numba", "CUDA", "cpu", "cores", "default"} <= set(names)
    assert len(names) <= 24


def test_version_says_why_torch_cannot_be_imported() -> None:
    broken = "import sys; sys.modules['torch'] = None; import nanoinfer.cli.app as a; a.main(['--version'])"
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cannot be imported: import of torch halted" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("spelling", [("-tp", "2"), ("--tp", "2"), ("--tensor-parallel-size", "2"), ("--tp=2",)])
def test_spellings_of_tensor_parallelism(nanoinfer: Program, spelling: tuple[str, ...]) -> None:
    nanoinfer("generate", "-p", "x", *spelling)
    assert nanoinfer.llm.config.tensor_parallel_size == 2


def test_engine_options_reach_the_engine(nanoinfer: Program) -> None:
    options = {
        "--max-num-seqs": "3", "--max-num-batched-tokens": "99", "--max-model-len": "auto", "--block-size": "8",
        "--gpu-memory-utilization": "0.5", "--num-blocks": "77", "--schedule": "prefill-first", "--attention": "torch",
        "--kernels": "eager", "--dtype": "float32", "--revision": "main", "--load-format": "dummy", "--device": "cpu",
        "--seed": "5", "--max-prefill-chunk": "6", "--kv-memory": "1MiB",
    }  # fmt: skip
    flags = ("--no-enable-prefix-caching", "--enforce-eager")
    nanoinfer("generate", "folder", "-p", "x", *flags, *(word for pair in options.items() for word in pair))
    config = nanoinfer.llm.config
    assert (config.model, config.max_num_seqs, config.max_num_batched_tokens) == ("folder", 3, 99)
    assert (config.max_model_len, config.block_size, config.num_blocks, config.kv_memory) == (None, 8, 77, 1 << 20)
    assert (config.schedule, config.attention, config.kernels) == ("prefill-first", "torch", "eager")
    assert (config.gpu_memory_utilization, config.dtype, config.device, config.seed) == (0.5, "float32", "cpu", 5)
    assert (config.revision, config.load_format, config.max_prefill_chunk) == ("main", "dummy", 6)
    assert (config.enable_prefix_caching, config.enforce_eager) == (False, True)


def test_every_engine_option_has_a_flag(nanoinfer: Program) -> None:
    help_text = nanoinfer("generate", "--help").out
    for name in {field.name for field in fields(EngineConfig)} - {"model_named"}:
        assert f"--{name.replace('_', '-')}" in help_text


@pytest.mark.parametrize("arguments", [("m1", "-m", "m1"), ("m1",), ("-m", "m1"), ("--model", "m1")])
def test_the_model_is_an_argument_or_an_option(nanoinfer: Program, arguments: tuple[str, ...]) -> None:
    nanoinfer("generate", *arguments, "-p", "x")
    assert nanoinfer.llm.config.model == "m1"


def test_two_models_contradict(nanoinfer: Program) -> None:
    result = nanoinfer("generate", "m1", "-m", "m2", "-p", "x")
    assert result.code == 2
    assert "two models are given, 'm1' and 'm2'" in result.err


# -- environment and configuration file --------------------------------------------------------------------------------


def write_config(text: str) -> None:
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "nanoinfer" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_flag_before_environment_before_file_before_default(
    nanoinfer: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config('model = "file"\nmax_num_seqs = 3\nblock-size = 32\ntemperature = 0.5\n[chat]\nmax_num_seqs = 4\n')
    monkeypatch.setenv("NANOINFER_MODEL", "environment")
    monkeypatch.setenv("NANOINFER_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("NANOINFER_TP", "2")
    nanoinfer("generate", "flag", "-p", "x", "--max-num-seqs", "6")
    config = nanoinfer.llm.config
    assert (config.model, config.max_num_seqs, config.tensor_parallel_size, config.block_size) == ("flag", 6, 2, 32)
    assert (config.dtype, config.model_named) == ("auto", "as asked for")
    assert nanoinfer.llm.submitted[0][1].temperature == 0.5
    nanoinfer("generate", "-p", "x")
    assert (nanoinfer.llm.config.model, nanoinfer.llm.config.max_num_seqs) == ("environment", 5)
    assert nanoinfer.llm.config.model_named == "from NANOINFER_MODEL"
    monkeypatch.delenv("NANOINFER_MODEL")
    monkeypatch.delenv("NANOINFER_MAX_NUM_SEQS")
    nanoinfer("generate", "-p", "x")
    assert (nanoinfer.llm.config.model, nanoinfer.llm.config.max_num_seqs) == ("file", 3)
    assert nanoinfer.llm.config.model_named == "from the configuration file"
    nanoinfer("chat", "-p", "x")
    assert nanoinfer.llm.config.max_num_seqs == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq = 3", "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("[serve]\nport = 1", "there is no command 'serve'; the tables are chat, generate, bench, inspect-cache."),
        ("[chat]\nnum_prompts = 1", "unknown setting 'num_prompts'"),
        ("block_size = 16\n= 3", "cannot read"),
        ("block_size = 16\n= 3", "(at line 2, column 1)"),
    ],
)
def test_a_wrong_configuration_file_is_refused_by_name(nanoinfer: Program, text: str, message: str) -> None:
    write_config(text)
    result = nanoinfer("generate", "-p", "x")
    assert (result.code, nanoinfer.llm) == (2, None)
    assert message in result.err
    assert "config.toml" in result.err


def test_every_option_has_a_variable(nanoinfer: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOINFER_SYSTEM", "be brief")
    nanoinfer("chat", "-p", "x")
    assert bytes(nanoinfer.llm.submitted[0][0]).startswith(b"<system>be brief")
    monkeypatch.setenv("NANOINFER_NUM_PROMPTS", "many")
    result = nanoinfer("bench")
    assert (result.code, "--num-prompts" in result.err) == (2, True)
    assert "(set in the environment)." in result.err


def test_a_variable_of_a_repeatable_option_has_one_value_a_line(
    nanoinfer: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOINFER_STOP", "the end")
    monkeypatch.setenv("NANOINFER_PROMPT", "what is it?\n two words\n")
    result = nanoinfer("generate")
    assert result.code == 0
    assert [prompt[0]["content"] for prompt, _, _ in nanoinfer.llm.submitted] == ["what is it?", " two words"]
    assert nanoinfer.llm.submitted[0][1].stop == ("the end",)


@pytest.mark.parametrize("line", ["max_num_seqs = 'many'", "max_num_seqs = 2.5", "schedule = 'magic'"])
def test_a_value_of_the_configuration_file_that_an_option_cannot_have(nanoinfer: Program, line: str) -> None:
    write_config(line)
    result = nanoinfer("generate", "-p", "x")
    assert (result.code, nanoinfer.llm) == (2, None)
    assert "--" + line.partition(" ")[0].replace("_", "-") in result.err
    assert "(set in the configuration file)." in result.err


def test_a_repeatable_option_is_a_list_in_the_configuration_file(nanoinfer: Program) -> None:
    write_config('[generate]\nstop = "x"')
    result = nanoinfer("generate", "-p", "x")
    assert (result.code, nanoinfer.llm) == (2, None)
    assert "Invalid value for '--stop': write a list, ['x'] (set in the configuration file)." in result.err
    write_config('[generate]\nstop = ["x y", "z"]')
    assert nanoinfer("generate", "-p", "x").code == 0
    assert nanoinfer.llm.submitted[0][1].stop == ("x y", "z")


def test_a_setting_that_only_one_command_has_may_stand_at_the_top(nanoinfer: Program) -> None:
    write_config('system = "be brief"')
    assert nanoinfer("generate", "-p", "x").code == 0
    nanoinfer("chat", "-p", "x")
    assert bytes(nanoinfer.llm.submitted[0][0]).startswith(b"<system>be brief")


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generat",), "Did you mean 'generate'?"),
        (("generate", "--max-num-seq", "3"), "--max-num-seqs"),
        (("generate", "-p", "x", "--max-num-seqs", "many"), "--max-num-seqs"),
        (("generate", "-p", "x", "--max-num-seqs", "0"), "max_num_seqs is 0; it must be a whole number of at least 1."),
        (
            ("generate", "-p", "x", "--max-tokens", "0"),
            "max_tokens is 0; it must be a whole number from 1 to 2147483647.",
        ),
        (("generate", "-p", "x", "--max-tokens", str(10**20)), "it must be a whole number from 1 to 2147483647."),
        (("generate", "-p", "x", "--temperature", "-1"), "temperature is -1.0"),
        (("generate", "-p", "x", "--block-size", "big"), "neither a whole number nor auto"),
        (("generate", "-p", "x", "--schedule", "magic"), "Invalid value for '--schedule': 'magic' is not one of"),
        (("generate", "-p", "x", "--device", "tpu"), "device is 'tpu'; it must be auto, cpu, cuda or cuda:N."),
        (("generate", "-p", "x", "-q", "-v"), "-q and -v contradict each other"),
        (("generate", "-p", "x", "--max-num-batched-tokens", "10"), "raise the first or lower the second"),
    ],
)
def test_wrong_options_are_refused_before_the_load(
    nanoinfer: Program, arguments: tuple[str, ...], message: str
) -> None:
    result = nanoinfer(*arguments)
    assert (result.code, result.out, nanoinfer.llm) == (2, "", None)
    assert message in " ".join(result.err.split())


def test_quiet_leaves_only_the_result(nanoinfer: Program) -> None:
    result = nanoinfer("generate", "-p", "hi", "-q")
    assert (result.out, result.err) == ("HI\n", "")


def test_a_pipe_gets_no_escape_codes(nanoinfer: Program) -> None:
    result = nanoinfer("generate", "-p", "hi", "--ui", "live")
    assert "\x1b" not in result.out + result.err
    assert "note: --ui live needs a terminal" in result.err


def test_something_is_said_before_the_model_is_loaded(nanoinfer: Program) -> None:
    def slow(config: EngineConfig) -> FakeLLM:
        sys.stderr.write("(loading)\n")
        return FakeLLM(config)

    nanoinfer.make = slow
    assert "starting m1 ...\n(loading)" in nanoinfer("generate", "-m", "m1", "-p", "hi").err


# -- as a process ------------------------------------------------------------------------------------------------------

NO_TORCH = "assert 'torch' not in sys.modules, 'torch was imported'"


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("bench", "--help"), ("generate", "--max-num-seqs", "0"), ("generate", "-p", ""),
     ("generate", "-f", "/dev/null"), ("bench", "--goodput", "x:1"),
     ("generate", "-m", "./none", "--load-format", "dummy", "-p", "x")],
)  # fmt: skip
def test_nothing_that_is_refused_or_only_told_imports_torch(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, code=NO_TORCH)
    assert result.code in (0, 2)
    assert "AssertionError" not in result.err


@pytest.mark.parametrize(("arguments", "limit"), [(("--help",), 0.3), (("generate", "--help"), 0.5)])
def test_help_is_quick(arguments: tuple[str, ...], limit: float) -> None:
    """In seconds of CPU time or, on a slow machine, in terms of what typer takes just before; the best of ten."""

    def cost(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    tried = []
    for _ in range(10):
        tried.append((cost("-c", "import typer"), cost("-m", "nanoinfer", *arguments)))
        typer_alone, ours = tried[-1]
        if ours < max(limit, 3 * typer_alone):
            return
    pytest.fail(f"{limit} s are allowed; typer alone and ours: {tried}")


def test_a_reader_that_leaves_early_ends_the_program_quietly() -> None:
    prompts = "".join(f"prompt number {i}\n" for i in range(2000))
    command = f'"{sys.executable}" "{HERE / "fake_main.py"}" -- generate -q | head -1'
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], input=prompts, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./no/such/folder", "there is no model './no/such/folder'"),
        ("{tmp}", "is no model folder (it has no config.json)"),
        ("{tmp}/bare", "weights"),
        ("{tmp}/notes.txt", "is a file but no .gguf file"),
    ],
)
def test_models_that_are_none_are_refused(tmp_path: Path, model: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    result = run("generate", "-m", model.format(tmp=tmp_path), "-p", "x")
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "Traceback" not in result.err
