"""The turns of a chat, without anything about screens or engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.engine.chat_template import Message


@dataclass
class Turn:
    """A question and, once it is there, its answer. `finish_reason` is that of the answer, None before there is one;
    thinking is kept for the reader and never given to the model again."""

    question: str
    answer: str = ""
    thinking: str = ""
    finish_reason: str | None = None


@dataclass
class Conversation:
    """A system prompt and turns, the newest last."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, *, system_role: bool = True) -> list[Message]:
        """What the chat template gets. Without a system role, the system prompt opens the first user message.

        A question without an answer (stopped while the model was still thinking) joins the next one: many templates
        refuse two questions in a row, and an empty answer would teach the model to give empty answers.
        """
        messages: list[Message] = []
        questions: list[str] = []
        if self.system and system_role:
            messages.append({"role": "system", "content": self.system})
        elif self.system:
            questions.append(self.system)
        for turn in self.turns:
            questions.append(turn.question)
            if turn.answer:
                messages.append({"role": "user", "content": "\n\n".join(questions)})
                messages.append({"role": "assistant", "content": turn.answer})
                questions = []
        if questions:
            messages.append({"role": "user", "content": "\n\n".join(questions)})
        return messages

    def ask(self, text: str) -> None:
        self.turns.append(Turn(text))

    def answered(self, text: str, thinking: str, finish_reason: str) -> None:
        """Complete the last turn."""
        turn = self.turns[-1]
        turn.answer, turn.thinking, turn.finish_reason = text, thinking, finish_reason

    def take_back(self) -> str | None:
        """Remove the last turn; returns its question, None if there is none."""
        return self.turns.pop().question if self.turns else None

    def without_oldest(self, number: int) -> Conversation:
        """A copy that has forgotten the `number` oldest turns."""
        return Conversation(self.system, self.turns[number:])

    def clear(self) -> None:
        self.turns.clear()
