"""`nanoinfer` as a process of its own, with the stand-in engine: python fake_main.py [ENGINE SETTINGS] -- ARGUMENTS.

Settings are names from `SETTINGS`, takes-time and is-quick; the line "step N" on standard error says that step N
begins, where asked for.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from fake_llm import ByteTokenizer, FakeLLM, shout

from nanoinfer.cli import chat_loop
from nanoinfer.cli.app import main
from nanoinfer.cli.session import Services


def slowly(step: int) -> None:
    """About 100 tokens a second, so that there is time to interrupt."""
    time.sleep(0.01)


def stuck(step: int) -> None:
    """A step that does not end."""
    while True:
        time.sleep(0.01)


# A paragraph of numbered words between other blocks.
STORY = "# Title\n\nsome **bold** text\n\n" + " ".join(f"w{i}" for i in range(70)) + "\n\n- *last* item\n"

SETTINGS: dict[str, dict[str, Any]] = {
    "endless": {"reply": lambda prompt: "word " * 400, "before_step": slowly},
    "thinks": {"reply": lambda prompt: "<think>\nlet me see\n</think>\n\n" + shout(prompt)},
    "thinks-long": {"reply": lambda prompt: "<think>" + "hm " * 600, "before_step": slowly},
    "markdown": {"reply": lambda prompt: STORY},
    "markdown-slowly": {"reply": lambda prompt: STORY, "before_step": slowly},
    "rude": {"reply": lambda prompt: "\x1b[2J\x1b[31mred\x1b]0;title\x07"},
    "stuck": {"before_step": stuck},
    "small": {"max_model_len": 100},
    "no-system": {"tokenizer": ByteTokenizer(system_role=False)},
}

if __name__ == "__main__":
    split = sys.argv.index("--")
    settings: dict[str, Any] = {}
    for name in sys.argv[1:split]:
        if name == "takes-time":  # a person whose next key never comes at once
            chat_loop.SECOND_S = 0.0
        elif name == "is-quick":  # a person whose next key always comes at once
            chat_loop.SECOND_S = 1e9
        else:
            settings |= SETTINGS[name]
    services = Services(lambda config, notify: FakeLLM(config, **settings), find_limits=lambda config: None)
    main(sys.argv[split + 1 :], services)
