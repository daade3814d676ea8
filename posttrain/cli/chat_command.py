"""A conversation with a checkpoint on the terminal: an environment whose turns are typed by a person."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType
from typing import Any

from posttrain.config.inference import Chat
from posttrain.config.service_options import SCORERS, named_services
from posttrain.core.messages import clip, readable
from posttrain.core.types import Ask, Env, Invalid, Reply, StopReason, Task, Turn, UserError
from posttrain.engines.local.embedded import embedded
from posttrain.envs.builtin.service_reward import question
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import MAX_TURNS
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.chat_choice import system_of
from posttrain.runs.checkpoint import resolve
from posttrain.training.playground import open_dialogue
from posttrain.training.setup import choose_device, use_threads

FENCE = '"""'
"""A line of the user that begins, and one that ends, a message of several lines."""


def converse(model: str, config: Chat) -> None:
    """Read lines and print replies until an empty line or the end of the input (Ctrl-D).

    Without a chat template, lines are text for the model to continue. The answers of reward models and judges are
    printed below each reply. Raises UserError if the checkpoint or a service cannot be loaded, or if there is a system
    message and no template for it.
    """
    use_threads(config.threads)
    folder, device = resolve(model), choose_device(config.device)
    tokenizer = Tokenizer.load(folder, config.chat_template, config.chat_template_kwargs)
    decoder = load_model(folder, device=device)
    chat = tokenizer.chat_template is not None
    if config.system is not None and not chat:
        raise UserError(
            f"{folder} has no chat template, which --system needs: leave out --system, or give --chat-template chatml"
        )
    kinds = {kind.replace("_", "-"): getattr(config, kind) for kind in SCORERS}
    raters = {name: kind for kind, given in kinds.items() for name, _ in named_services(given, kind)}
    system = system_of(folder) if config.system is None and chat else config.system
    with open_dialogue(config, dialogue(_ask, _say, system, chat, raters), device) as ground:
        if system is not None:
            _say(f"the system message{'' if config.system is not None else ' of its run'}: {clip(system)}")
        what = "a message" if chat else "text to continue"
        print(f"{what} and Enter; an empty line ends; several lines between two lines {FENCE}")
        player = ground.player(embedded(decoder, tokenizer, slots=1), tokenizer, decoder.config.context)
        for played in player.play([Episode({"id": "dialogue"}, "dialogue", secrets.randbits(62))]):
            if isinstance(played.reward, Invalid):  # the typed text cannot be shown to the model
                raise UserError(f"the conversation ends here: {played.reward.reason}")


def dialogue(
    ask: Callable[[], str],
    say: Callable[[str], None],
    system: str | None,
    chat: bool,
    raters: Mapping[str, str] = MappingProxyType({}),
) -> Env:
    """Return the environment: it shows the model the texts from `ask`, and passes replies to `say`, until `ask` returns
    "".

    `raters`: the services that score each reply, with their kinds ("reward-model" or "judge"). Their answers are passed
    to `say` too.
    """

    def environment(task: Task) -> Generator[Turn | str | Ask, Any, float]:
        opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
        so_far = Turn(messages=[]) if chat else Turn(text="")
        for _ in range(MAX_TURNS):
            if not (typed := ask()):
                return 0.0
            turn = Turn(messages=[*opening, {"role": "user", "content": typed}]) if chat else Turn(text=typed)
            opening = []
            reply: Reply = yield turn
            say(reply)
            if reply.stop is StopReason.LENGTH:
                say("(cut off by --max-tokens)")
            if reply.stop is StopReason.CONTEXT:
                say("(the model's context is full)")
                return 0.0
            asked = _joined(so_far, turn)
            for name, kind in raters.items():
                answer = yield Ask(name, question(kind, asked, reply))
                say(f"({name}: {_answer_text(answer)})")
            said = Turn(messages=[{"role": "assistant", "content": str(reply)}]) if chat else Turn(text=str(reply))
            so_far = _joined(asked, said)
        say(f"(that was turn {MAX_TURNS}, the last one: start again)")
        return 0.0

    return environment


def _joined(before: Turn, after: Turn) -> Turn:
    """Join two turns of messages, or of text."""
    if before.messages is not None:
        return Turn(messages=[*before.messages, *(after.messages or ())])
    return Turn(text=(before.text or "") + (after.text or ""))


def _answer_text(answer: Any) -> str:
    """Return a service's answer as text."""
    if isinstance(answer, Invalid):
        return f"no answer, {answer.reason}"
    if isinstance(answer, dict):
        return ", ".join(f"{name} {_answer_text(value)}" for name, value in answer.items())
    return f"{answer:.4g}" if isinstance(answer, float) else str(answer)


def _say(text: str) -> None:
    """Print a model's text with control codes made visible."""
    print(readable(text))


def _ask() -> str:
    """Read a message: a line, or the lines between two lines that are `FENCE`, as code and letters need them."""
    lines: list[str] = []
    try:
        while not any(lines):  # between the marks something must be said
            typed, lines = input("> "), []
            if typed.strip() != FENCE:
                return typed
            while (line := input("... ")).strip() != FENCE:
                lines.append(line)
    except EOFError:
        print()
    return "\n".join(lines)
