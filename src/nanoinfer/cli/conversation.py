"""The messages of a chat, without anything about screens or engines."""

from __future__ import annotations

from dataclasses import dataclass, field

Message = dict[str, str]


@dataclass
class Conversation:
    """A system prompt and turns; a turn is a user message and, once it is there, the assistant's answer."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def messages(self, *, system_role: bool = True) -> list[Message]:
        """What the chat template gets. Without a system role, the system prompt opens the first user message."""
        if not self.system:
            return list(self.turns)
        if system_role:
            return [{"role": "system", "content": self.system}, *self.turns]
        first, *rest = self.turns
        return [{**first, "content": f"{self.system}\n\n{first['content']}"}, *rest]

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """Keep the answer; without any, take the question back, since two in a row confuse chat templates."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.take_back()

    def take_back(self) -> str | None:
        """Remove the last user message and what followed it; returns its text, None if there is none."""
        for index in range(len(self.turns) - 1, -1, -1):
            if self.turns[index]["role"] == "user":
                text = self.turns[index]["content"]
                del self.turns[index:]
                return text
        return None

    @property
    def has_earlier_turns(self) -> bool:
        """Whether there is a question before the last one."""
        return sum(message["role"] == "user" for message in self.turns) > 1

    def drop_oldest(self) -> bool:
        """Forget the oldest question with its answer, but never the last question; whether there was one to forget."""
        later = [index for index, message in enumerate(self.turns) if message["role"] == "user"][1:]
        if not later:
            return False
        del self.turns[: later[0]]
        return True

    def clear(self) -> None:
        self.turns.clear()
