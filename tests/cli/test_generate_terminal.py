"""`nanoinfer generate` on a pseudo-terminal: what stays on the screen, and Ctrl-C."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pexpect
import pyte

HERE = Path(__file__).parent


def start(tmp_path: Path, settings: list[str], arguments: list[str]) -> pexpect.spawn:
    environment = {**os.environ, "TERM": "xterm", "XDG_CONFIG_HOME": str(tmp_path)}
    for name in ("NO_COLOR", "CI"):
        environment.pop(name, None)
    return pexpect.spawn(
        sys.executable, [str(HERE / "fake_main.py"), *settings, "--", "generate", *arguments],
        env=environment, encoding="utf-8", timeout=20, dimensions=(60, 100),
    )  # fmt: skip


def screen_after(child: pexpect.spawn) -> list[str]:
    """The lines that a person sees when the program has ended."""
    child.expect(pexpect.EOF)
    screen = pyte.Screen(100, 60)
    pyte.Stream(screen).feed(child.before)
    child.close()
    return [line.rstrip() for line in screen.display if line.strip()]


def test_the_last_frame_stays_between_results_and_summary(tmp_path: Path) -> None:
    prompts = tmp_path / "in.txt"
    prompts.write_text("one\ntwo\n")
    child = start(tmp_path, ["endless"], ["-f", str(prompts), "--max-tokens", "60", "--order", "completion"])
    lines = screen_after(child)
    assert child.exitstatus == 0
    records = [line for line in lines if line.startswith("{")]
    assert len(records) == 2
    [title] = [n for n, line in enumerate(lines) if line.startswith("nanoinfer generate · done")]
    assert title > max(n for n, line in enumerate(lines) if line.startswith("{"))
    assert "2 of 2 done" in "".join(lines[title:])
    assert "2 answers in" in lines[-1]


def test_control_c_says_where_the_results_are(tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a", "max_tokens": 3}\n{"prompt": "b"}\n')
    child = start(tmp_path, ["endless"], ["-f", str(prompts), "-o", str(out)])
    child.expect("1 of 2 done")
    child.sendintr()
    lines = screen_after(child)
    assert child.exitstatus == 130
    # The long path may wrap; the words around it are what matters.
    assert "warning: 1 of 2 results are in" in " ".join(lines)
    assert not out.exists()
    _, result = (tmp_path / "out.jsonl.partial").read_text().splitlines()
    assert json.loads(result)["record"]["index"] == 0


def test_the_first_control_c_says_what_it_waits_for_and_the_second_leaves_at_once(tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    child = start(tmp_path, ["stuck"], ["-f", str(prompts), "-o", str(out)])
    child.expect("0 of 1 done")
    child.sendintr()
    child.expect("stopping after this step; Ctrl-C again leaves at once")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
