"""A reward model of this machine as a service: text in, a number out.

It tokenizes text with its own tokenizer, as in its training, because the policy's ids mean other tokens. Texts are
computed together, but no bit of a score depends on the other texts: products are computed in blocks of a fixed size,
and each text attends only to itself. Where there is no compiled code for that, texts are computed one by one.

T    tokens of all texts    S    texts
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.core.batch import Layout
from posttrain.core.protocols import Service
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Invalid, InvalidKind, StopReason, UserError
from posttrain.data.chat_prompts import AsMessages
from posttrain.envs.demonstration import demonstrate, demonstrate_steps, last_alone
from posttrain.models.adapters.adapter_config import described_in
from posttrain.models.checkpoint_folder import stored_names
from posttrain.models.checkpoint_location import checkpoint_folder
from posttrain.models.gpu_placement import working_on
from posttrain.models.json_files import read_json
from posttrain.models.reward_model import OFFSET, load_reward_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.weight_files import SCORE
from posttrain.runs.chat_choice import chatting

TOGETHER = 4096  # tokens per forward pass
FORMS = '{"prompt": ..., "response": ...}, {"messages": [...]}, {"prompt": ..., "steps": [...]} or text'


@dataclass(frozen=True)
class _Text:
    """A text to score."""

    tokens: list[int]
    at: list[int]  # indices of the tokens whose hidden states are read
    each: bool = False  # whether each of these has its own score; otherwise the text has one, their mean


class RewardModelService:
    """Service of a reward model; implements `posttrain.core.protocols.Service`.

    Content: {"prompt", "response"}, or {"messages"} that end with an assistant message, tokenized as in training, with
    "cut" if the response was truncated; or text, which is scored unchanged. The answer is a number. With "steps", a
    list of texts in place of a response, the answer is a list: the score of each step at its last token, all computed
    in one pass; "begun" is text between the messages and the first step. A prompt is rendered with the chat template if
    rows were in training, and a single message without one if there is none. The model's offset, which centres its
    scores, is added if it has one.
    """

    def __init__(
        self, folder: str | Path, device: str | torch.device = "cpu", matrices: torch.dtype | None = None
    ) -> None:
        """Load the reward model. Raises UserError if the folder does not exist, has an unsupported model family, or has
        no score head. `matrices`: see `posttrain.models.checkpoint_folder.load_model`.
        """
        self.folder = checkpoint_folder(folder)
        read_json(described_in(self.folder) / "config.json")
        if SCORE not in stored_names(self.folder):  # reported before everything is loaded
            raise UserError(
                f"--reward-model {folder} has no score head ({SCORE}): it is a language model, not a reward model; give a "
                "run of posttrain reward-model, or a sequence-classification checkpoint of one label"
            )
        self.model = load_reward_model(self.folder, device, matrices).requires_grad_(False)
        self.device = torch.device(device)
        self.tokenizer = Tokenizer.load(self.folder)
        self.eos_ids = self.model.eos_ids or tuple(id for id in [self.tokenizer.eos_id] if id is not None)
        self.chat = chatting(None, self.folder, self.tokenizer, self.eos_ids)
        if not self.eos_ids:
            raise UserError(
                f"--reward-model {folder} names no end-of-sequence token: set eos_token_id in its config.json"
            )
        self._asked: deque[tuple[int, _Text]] = deque()
        self._answers: list[tuple[int, Any]] = []
        self._counts = {"scored": 0.0, "tokens": 0.0, "invalid": 0.0}

    @property
    def identity(self) -> str:
        """A string that differs between heads, which represent the weights."""
        head = self.model.score.detach().cpu().numpy().tobytes()
        return f"{hashlib.blake2b(head, digest_size=16).hexdigest()} {self.model.offset!r}"

    @property
    def description(self) -> str:
        count = sum(p.numel() for p in self.model.parameters())
        centred = f", adds {self.model.offset:+g} to every score ({OFFSET})" if self.model.offset else ""
        return f"{self.folder}, {count:,} parameters, context {self.model.config.context}{centred}"

    def submit(self, id: int, content: Any) -> None:
        text = self._read(content)
        if isinstance(text, Invalid):
            self._counts["invalid"] += 1
            self._answers.append((id, text))
        else:
            self._asked.append((id, text))

    def poll(self) -> list[tuple[int, Any]]:
        """Compute the next few texts, and return their scores."""
        some: list[tuple[int, _Text]] = []
        size = 0
        while self._asked and (not some or size + len(self._asked[0][1].tokens) <= TOGETHER):
            some.append(self._asked.popleft())
            size += len(some[-1][1].tokens)
        if some:
            with working_on(self.device):
                scores = self._scores([text for _, text in some])
            self._answers += [(id, self._read_scores(own)) for (id, _), own in zip(some, scores, strict=True)]
            self._counts["scored"] += len(some)
            self._counts["tokens"] += size
        answers, self._answers = self._answers, []
        return answers

    def example(self, content: Any) -> Any:
        steps = content.get("steps") if isinstance(content, dict) else None
        return [0.5] * len(steps) if isinstance(steps, list) else 0.5

    def counts(self) -> dict[str, float]:
        return dict(self._counts)

    def close(self) -> None:
        self._asked.clear()

    @torch.no_grad()
    def _scores(self, texts: Sequence[_Text]) -> list[float | list[float]]:
        """Return the score of each text, or the scores of its steps: [S]."""
        groups = [texts] if self.model.backbone.apart else [[text] for text in texts]
        hidden = [own for group in groups for own in self._hidden(group)]
        return [
            [self._score(state) for state in own.split(1)] if text.each else self._score(own)
            for text, own in zip(texts, hidden, strict=True)
        ]

    def _score(self, hidden: Tensor) -> float:
        """Return the score of hidden states [n, D]: their mean score plus the offset.

        Each text is computed separately, so that others do not change a bit of it.
        """
        scores = (self.model.transformed(hidden).float() * self.model.score).sum(-1).double()
        return scores.mean().item() + self.model.offset

    def _hidden(self, texts: Sequence[_Text]) -> Sequence[Tensor]:
        """Return the hidden states [n, D] of each text at its tokens `at`."""
        length = [len(text.tokens) for text in texts]
        start = [sum(length[:place]) for place in range(len(length))]
        layout = Layout(
            torch.tensor([token for text in texts for token in text.tokens], device=self.device),
            torch.cat([torch.arange(n) for n in length]).to(self.device),
            tuple(start),
            tuple(length),
            (-1,) * len(length),
        )
        places = [first + at for first, text in zip(start, texts, strict=True) for at in text.at]
        at = torch.tensor(places, device=self.device)
        backbone = self.model.backbone
        hidden = backbone.hidden_apart(layout, at) if backbone.apart else backbone.hidden(layout, at)
        return hidden.split([len(text.at) for text in texts])

    def _read(self, content: Any) -> _Text | Invalid:
        """Tokenize a request's text, and choose the tokens whose hidden states are read."""
        of = content.keys() - {"cut"} if isinstance(content, dict) else set()
        in_steps = "steps" in of
        try:
            if isinstance(content, str):
                transcript = Transcript()
                transcript.imitate(self.tokenizer.encode(content, start=True))
            elif in_steps and _steps(content):
                if self.model.shape.pooling == "mean":
                    return _invalid(
                        f"the reward model {self.folder} pools over whole replies, so it cannot score steps"
                    )
                asked = self._as_trained({name: content[name] for name in ("prompt", "messages") if name in content})
                transcript = demonstrate_steps(asked, content["steps"], self.tokenizer, content.get("begun", ""))
            elif (of == {"prompt", "response"} and _texts(content)) or (of == {"messages"} and _chat(content)):
                read = self._as_trained(content)
                if content.get("cut"):
                    read = {**read, "response_stop": str(StopReason.LENGTH)}
                whole = demonstrate(read, self.tokenizer, self.eos_ids, "last")
                transcript = last_alone(whole, self.eos_ids if content.get("cut") else ())
            else:
                return _invalid(f"a reward model is asked with {FORMS}")
        except UserError as error:
            return _invalid(f"the reward model {self.folder} cannot read it: {error}")
        at = transcript.scored.tolist()
        if in_steps:
            at = [span.start + span.length - 1 for span in transcript.spans if span.learned]
        tokens = transcript.tokens[: at[-1] + 1] if at else []
        most = self.model.config.context
        if not 0 < len(tokens) <= most:
            kind = InvalidKind.TOO_LONG if tokens else InvalidKind.UNANSWERED
            return Invalid(f"{len(tokens)} tokens; the reward model {self.folder} reads 1 to {most}", kind)
        if max(tokens) >= self.model.config.vocab:
            return _invalid(f"the tokenizer of the reward model {self.folder} has more tokens than its vocabulary")
        return _Text(tokens, at if in_steps or self.model.shape.pooling == "mean" else at[-1:], in_steps)

    def _as_trained(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return a request in the form of training, for rows with a plain prompt."""
        if "prompt" in content and self.chat.on:
            return AsMessages(self.chat.system, answered=True)(content)
        messages = content.get("messages", ())
        roles = [m["role"] for m in messages]
        if self.tokenizer.chat_template is None and roles in (["user", "assistant"], ["user"]):
            answered = {"response": messages[1]["content"]} if messages[1:] else {}
            return {"prompt": messages[0]["content"], **answered}
        return content

    def _read_scores(self, scores: float | list[float]) -> float | list[float] | Invalid:
        if all(map(math.isfinite, scores if isinstance(scores, list) else [scores])):
            return scores
        self._counts["invalid"] += 1
        return _invalid(f"the reward model {self.folder} gave {scores}")


def _invalid(reason: str) -> Invalid:
    return Invalid(reason, InvalidKind.UNANSWERED)


def _texts(content: dict[str, Any]) -> bool:
    return all(isinstance(value, str) or (name == "cut" and isinstance(value, bool)) for name, value in content.items())


def _chat(content: dict[str, Any]) -> bool:
    messages = content["messages"]
    return (
        _are_messages(messages) and messages[-1]["role"] == "assistant" and isinstance(content.get("cut", False), bool)
    )


def _are_messages(given: Any) -> bool:
    some = isinstance(given, list) and bool(given)
    return some and all(isinstance(m, dict) and {"role", "content"} <= m.keys() and _texts(m) for m in given)


def _steps(content: dict[str, Any]) -> bool:
    """Return whether the content has steps: nonblank texts after a prompt or messages."""
    steps, before = content["steps"], content.keys() - {"steps", "begun"}
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        return False
    if not isinstance(content.get("begun", ""), str):
        return False
    if before == {"messages"}:
        return _are_messages(content["messages"])
    return before == {"prompt"} and isinstance(content["prompt"], str)


if TYPE_CHECKING:
    _proof: Callable[..., Service] = RewardModelService
