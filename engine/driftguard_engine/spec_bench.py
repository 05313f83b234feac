"""`python -m driftguard_engine.spec_bench QUESTIONS --method NAME --output FILE`: Spec-Bench on this engine.

Reads the question file of Spec-Bench (Xia et al. 2024, arXiv:2401.07851), answers each question at
temperature 0, one at a time, and writes its answer format, so that its evaluation scripts read the file.
Each question is answered twice in a row, with speculation and without it, so that a slow moment of the
machine affects both; the answers without go to --baseline-output.

Their script for speed counts the baseline's tokens as those of the text less one, for the token that begins a
text in many tokenizers. Where a tokenizer has none, its baseline is a little too slow; the table printed here
counts the tokens that were produced.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from driftguard_engine.config import InvalidConfig
from driftguard_engine.core import EngineError, FinishedRequest, Request, SamplingParams
from driftguard_engine.engine import Engine
from driftguard_engine.options import (
    DeviceName,
    DrafterName,
    LimitOptions,
    ModelOptions,
    ServerOptions,
    engine_config,
)

# The eight categories of MT-Bench are reported as one.
_MT_BENCH = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
_WARM_UP_QUESTIONS = 3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class BadQuestions(ValueError):
    """The question file; the message names it and the line."""


@dataclass(frozen=True, slots=True)
class Question:
    question_id: int
    category: str
    turns: tuple[str, ...]

    @property
    def task(self) -> str:
        return "mt_bench" if self.category in _MT_BENCH else self.category


@dataclass(slots=True)
class Answer:
    """All turns of one question. Lists have one entry for each turn, accept_lengths one for each step."""

    turns: list[str] = field(default_factory=list)
    decoding_steps: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    wall_time: list[float] = field(default_factory=list)  # seconds, with the reading of the prompt
    accept_lengths: list[int] = field(default_factory=list)  # tokens that a step emitted
    drafted: int = 0
    accepted: int = 0
    cut: int = 0  # turns whose prompt was too long for the model

    @property
    def tokens_per_second(self) -> float:
        return sum(self.new_tokens) / sum(self.wall_time)

    def line(self, question: Question, model_id: str) -> str:
        choice = {
            "index": 0,
            "turns": self.turns,
            "decoding_steps": self.decoding_steps,
            "new_tokens": self.new_tokens,
            "wall_time": self.wall_time,
            "accept_lengths": self.accept_lengths,
        }
        told = {
            "question_id": question.question_id,
            "category": question.category,
            "answer_id": uuid4().hex,
            "model_id": model_id,
            "choices": [choice],
            "tstamp": time.time(),
        }
        return json.dumps(told) + "\n"


def read_questions(path: Path) -> list[Question]:
    """Raises BadQuestions."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadQuestions(f"{path} cannot be read ({error})") from None
    found = [_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadQuestions(f"{path} has no questions")
    return found


def _question(path: Path, number: int, line: str) -> Question:
    try:
        told = json.loads(line)
        turns = tuple(str(turn) for turn in told["turns"])
        question = Question(int(told["question_id"]), str(told["category"]), turns)
    except (ValueError, TypeError, KeyError) as error:
        raise BadQuestions(f"{path}, line {number}: no question of Spec-Bench ({error!r})") from None
    if not question.turns:
        raise BadQuestions(f"{path}, line {number}: turns is empty")
    return question


class Answerer:
    """Asks the engine one turn after another, each behind the turns and answers before it."""

    def __init__(self, engine: Engine, max_new_tokens: int) -> None:
        """Raises InvalidConfig: there is no room for a prompt."""
        if not 0 < max_new_tokens < engine.max_length:
            raise InvalidConfig(
                f"max_new_tokens: {max_new_tokens} is not between 1 and {engine.max_length - 1}, which "
                "leaves room for a prompt"
            )
        self._engine = engine
        self._max_new_tokens = max_new_tokens
        self._asked = 0

    def answer(self, question: Question, *, speculation: bool) -> Answer:
        """Raises EngineError: a turn ended with an error."""
        answer = Answer()
        messages: list[dict[str, str]] = []
        for turn in question.turns:
            messages.append({"role": "user", "content": turn})
            prompt = self._prompt(messages)
            room = self._engine.max_length - self._max_new_tokens
            answer.cut += len(prompt) > room
            began = time.perf_counter()
            finished, lengths = self._run(prompt[-room:], speculation=speculation)
            answer.wall_time.append(time.perf_counter() - began)
            answer.turns.append(finished.text.strip())
            answer.decoding_steps.append(finished.counts.steps)
            answer.new_tokens.append(len(finished.output_token_ids))
            answer.accept_lengths += lengths
            answer.drafted += finished.counts.drafted
            answer.accepted += finished.counts.accepted
            messages.append({"role": "assistant", "content": answer.turns[-1]})
        return answer

    def _run(self, prompt: Sequence[int], *, speculation: bool) -> tuple[FinishedRequest, list[int]]:
        self._asked += 1
        params = SamplingParams(
            max_tokens=self._max_new_tokens,
            temperature=0.0,
            num_speculative_tokens=None if speculation else 0,
        )
        self._engine.submit(Request(f"{self._asked}", tuple(prompt), params, datetime.now(UTC)))
        lengths: list[int] = []
        while True:
            for output in self._engine.step():
                if output.token_ids:
                    lengths.append(len(output.token_ids))
                if output.finished is not None:
                    if output.finished.error is not None:
                        raise EngineError(f"an answer ended with an error: {output.finished.error}")
                    return output.finished, lengths

    def _prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        tokenizer: Any = self._engine.tokenizer
        if tokenizer.chat_template is not None:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return ids
        turns = (f"{message['role'].upper()}: {message['content']}\n" for message in messages)
        plain: list[int] = tokenizer.encode("".join(turns) + "ASSISTANT:")
        return plain


def run(
    answerer: Answerer,
    questions: Sequence[Question],
    on_answer: Callable[[Question, Answer, Answer], None],
) -> None:
    """on_answer: gets each question with its answers with and without speculation, which take turns in being
    first."""
    for question in questions[:_WARM_UP_QUESTIONS]:
        for speculation in (True, False):
            answerer.answer(question, speculation=speculation)
    for number, question in enumerate(questions):
        order = (True, False) if number % 2 else (False, True)
        found = {speculation: answerer.answer(question, speculation=speculation) for speculation in order}
        on_answer(question, found[True], found[False])


@dataclass(slots=True)
class Task:
    """The answers of one task so far."""

    pairs: list[tuple[Answer, Answer]] = field(default_factory=list)

    def row(self, name: str) -> str:
        """As Spec-Bench does: means over steps and over questions; the acceptance rate is a ratio of sums."""
        lengths = [length for answer, _ in self.pairs for length in answer.accept_lengths]
        drafted = sum(answer.drafted for answer, _ in self.pairs)
        accepted = sum(answer.accepted for answer, _ in self.pairs)
        fast, slow = (
            sum(pair[place].tokens_per_second for pair in self.pairs) / len(self.pairs) for place in (0, 1)
        )
        rate = f"{accepted / drafted:.3f}" if drafted else "-"
        cut = sum(answer.cut for answer, _ in self.pairs)
        return (
            f"{name:<16}{len(self.pairs):>10}{sum(lengths) / len(lengths):>10.2f}{rate:>12}{fast:>10.0f}"
            f"{slow:>10.0f}{fast / slow:>9.2f}x{cut:>13}"
        )


HEADER = (
    f"{'task':<16}{'questions':>10}{'accepted':>10}{'acceptance':>12}{'tokens/s':>10}{'without':>10}"
    f"{'speed-up':>10}{'cut prompts':>13}"
)


def table(tasks: dict[str, Task]) -> Iterator[str]:
    yield HEADER
    for name, task in tasks.items():
        yield task.row(name)
    yield Task([pair for task in tasks.values() for pair in task.pairs]).row("overall")


@app.command()
def main(
    questions: Annotated[Path, typer.Argument(help="Spec-Bench's question.jsonl.")],
    output: Annotated[Path, typer.Option(help="Answers with speculation, in Spec-Bench's format.")],
    method: Annotated[str, typer.Option(help="What drafts.")] = DrafterName.DRAFT_MODEL.value,
    baseline_output: Annotated[Path | None, typer.Option(help="Answers without it, in its format.")] = None,
    target: Annotated[str | None, typer.Option(help="Target model. Without it the bundled one.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft model, head, Medusa heads, streaming adapter or corpus.")
    ] = None,
    num_speculative_tokens: Annotated[int, typer.Option(help="Draft tokens per step (K).")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer to a turn.")] = 128,
    max_length: Annotated[int, typer.Option(help="Tokens of prompt and answer.")] = 2048,
    every: Annotated[int, typer.Option(min=1, help="Ask every n-th question only.")] = 1,
    device: Annotated[DeviceName, typer.Option(help="Where the models run.")] = DeviceName.CPU,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Answer Spec-Bench's questions with and without speculation, and print a table by task.

    Prompts that are too long are cut at the beginning, and counted.
    """
    models = ModelOptions(
        target=target,
        draft=draft,
        drafter=method,
        device=device,
        threads=threads,
        num_speculative_tokens=num_speculative_tokens,
    )
    limits = LimitOptions(max_batch=1, max_length=max_length, prefix_reuse=False)
    tasks: dict[str, Task] = {}
    paths = [path.absolute() for path in (questions, output, baseline_output) if path is not None]
    if len(set(paths)) < len(paths):
        raise typer.BadParameter("the questions, --output and --baseline-output must be different files")
    try:
        asked = read_questions(questions)[::every]
        engine = Engine(engine_config(models, limits, ServerOptions()))
        answerer = Answerer(engine, max_new_tokens)
        with ExitStack() as files:
            opened = [
                None if path is None else files.enter_context(path.open("w", encoding="utf-8"))
                for path in (output, baseline_output)
            ]

            def write(question: Question, fast: Answer, slow: Answer) -> None:
                told = ((fast, method), (slow, DrafterName.NONE.value))
                for file, (answer, drafter) in zip(opened, told, strict=True):
                    if file is not None:
                        file.write(answer.line(question, f"{engine.target_name}-{drafter}"))
                        file.flush()
                tasks.setdefault(question.task, Task()).pairs.append((fast, slow))

            run(answerer, asked, write)
    except (BadQuestions, InvalidConfig, EngineError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    for line in table(tasks):
        typer.echo(line)
    ahead = engine.ahead
    if ahead is not None and ahead.overlap is not None:
        typer.echo(
            f"drafted ahead: of {ahead.lookups} outcomes {ahead.hits} ({ahead.hit_rate:.0%}) were prepared; "
            f"the target's passes hid {ahead.overlap:.0%} of the drafting for them"
        )


if __name__ == "__main__":
    app()
