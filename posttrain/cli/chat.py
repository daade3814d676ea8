"""A conversation with a checkpoint on the terminal: an environment whose turns a person types."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator

from posttrain.engines.embedded import embedded
from posttrain.envs.play import MAX_TURNS, Episode, Player
from posttrain.envs.pool import EnvPool
from posttrain.models.folder import load_model
from posttrain.models.tokenizer import Tokenizer
from posttrain.runs.checkpoint import resolve
from posttrain.training.setup import choose_device
from posttrain.types import Env, Reply, Sampling, StopReason, Task, Turn, UserError


def converse(model: str, system: str | None, temperature: float, max_tokens: int, device: str) -> None:
    """Read lines and print replies until an empty line or the end of the input (Ctrl-D).

    Without a chat template, lines are text for the model to continue. Raises UserError if the checkpoint cannot be
    loaded, or if there is a system message and no template to put it in.
    """
    if temperature < 0 or max_tokens < 1:
        raise UserError("--temperature must be 0 or more and --max-tokens at least 1")
    folder = resolve(model)
    decoder, tokenizer = load_model(folder, device=choose_device(device)), Tokenizer.load(folder)
    chat = tokenizer.chat_template is not None
    if system is not None and not chat:
        raise UserError(f"{folder} has no chat template, so it knows no system message: leave out --system")
    print("a message and Enter; an empty line ends" if chat else "text to continue and Enter; an empty line ends")
    sampling = Sampling(temperature, max_tokens=max_tokens)
    episode = Episode({"id": "dialogue"}, "dialogue", secrets.randbits(62))
    with EnvPool(dialogue(_ask, print, system, chat), workers=0) as pool:
        engine = embedded(decoder, tokenizer, slots=1)
        Player(pool, engine, tokenizer, sampling, decoder.config.context).play([episode])


def dialogue(ask: Callable[[], str], say: Callable[[str], None], system: str | None, chat: bool) -> Env:
    """The environment: what `ask` returns is shown to the model, and what it replies is said, until "" is asked."""

    def environment(task: Task) -> Generator[Turn | str, Reply, float]:
        opening = [{"role": "system", "content": system}] if system is not None else []
        for _ in range(MAX_TURNS):
            if not (text := ask()):
                return 0.0
            reply = yield Turn(messages=[*opening, {"role": "user", "content": text}]) if chat else Turn(text=text)
            opening = []
            say(reply)
            if reply.stop is StopReason.CONTEXT:
                say("(the model's context is full)")
                return 0.0
        say(f"(that was turn {MAX_TURNS}: begin anew)")
        return 0.0

    return environment


def _ask() -> str:
    try:
        return input("> ")
    except EOFError:
        print()
        return ""
