"""Converts text to tokens and back, and chat messages to text. A thin layer over the `tokenizers` library.

It distinguishes the start of a context from a continuation. SentencePiece-like tokenizers put a space before every text
that they encode, and strip it from every text that they decode, which is right only at the start of a context. Later
turns of a prompt and replies that are decoded alone are continuations: the space is neither added nor stripped, so that
decode(a) + decode(b) is the text of the tokens a + b.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, Literal

import tokenizers

from posttrain.core import run_date
from posttrain.core.messages import near
from posttrain.core.pictures import PictureError, has_parts
from posttrain.core.thoughts import REASONING, reasoning_of, without_reasoning
from posttrain.core.transcripts import Media
from posttrain.core.types import ToolCall, UserError
from posttrain.models.checkpoint_location import checkpoint_folder
from posttrain.models.gguf.gguf_file import is_gguf
from posttrain.models.image_processor import PLACE, ImageProcessor
from posttrain.models.json_files import read_json, read_text, write_json
from posttrain.models.tokenizer.custom_template import read_template
from posttrain.models.tokenizer.gguf_tokenizer import gguf_tokenizer
from posttrain.models.tokenizer.rendered_continuation import MARK, WORD, Continuation, rendered_continuation
from posttrain.models.tokenizer.text_start import opening_ids, without_leading_space
from posttrain.models.tokenizer.tokenizer_files import (
    KWARGS_KEY,
    NAMED_TOKENS,
    check_ids,
    failed,
    read_special,
    refusing,
    stored_template,
    token_text,
)
from posttrain.models.tokenizer.tokenizer_training import PAD, trained
from posttrain.models.tokenizer.tool_format import format_of
from posttrain.models.tokenizer.tool_parser import ToolFormat, check_shown, with_calls

BLIND = "this model is text-only, and a message has a picture: use a vision-language model, or leave it out"
MOST_OF_ROWS = 1024  # tokenizers with the variables of rows that are kept


def _in_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Join the parts of a text-only message, for templates that expect text."""
    content = message.get("content")
    if not isinstance(content, list) or has_parts(content):
        return dict(message)
    return {**message, "content": "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))}


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


class Tokenizer:
    """A trained tokenizer with its special tokens and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        chat_template: str | None = None,
        template_name: str = "the chat template",
    ) -> None:
        """Create it from a `tokenizers` tokenizer, the checked tokenizer_config.json and the text of the chat template.

        `template_name`: file or entry with the template, named in messages.
        """
        backend.no_truncation()  # a limit stored in tokenizer.json would silently cut texts
        backend.no_padding()
        self.config = dict(config)
        self.chat_template = chat_template
        self.template_name = template_name
        self.special = {name: token_text(config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.backend = backend
        self.pictures: ImageProcessor | None = None  # image processor of a vision-language model
        self._parts: dict[str, bool] = {}  # cache: chat template -> `_takes_parts`
        self._formats: dict[str, ToolFormat | None] = {}  # cache: chat template -> `tool_format`
        self._reasoning: dict[str, str | None] = {}  # cache: chat template -> `reasoning_name`
        self._of_rows: dict[str, Tokenizer] = {}  # cache: variables of rows -> the tokenizer with them
        self._continuation = without_leading_space(backend)
        self._opening = opening_ids(backend)
        self.eos_id, self.bos_id, self.pad_id = (self._id(name) for name in ("eos_token", "bos_token", "pad_token"))
        self.unknown_id = self._id("unk_token")  # id of the token for text outside the vocabulary

    @property
    def day(self) -> str | None:
        """Date for the chat template if no run has fixed one: that of the run that saved the tokenizer; None: today."""
        return self.config.get(run_date.CONFIG_KEY)

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """Variables that the chat template gets beside messages and tools, such as enable_thinking."""
        return dict(self.config.get(KWARGS_KEY) or {})

    @property
    def template_variables(self) -> list[str]:
        """Names of the variables that the chat template reads beside messages and tools, in alphabetic order."""
        from posttrain.models.tokenizer.chat_template import variables_read

        assert self.chat_template is not None
        ours = {"messages", "tools", "documents", "add_generation_prompt", *NAMED_TOKENS}
        return sorted(variables_read(self.chat_template) - ours)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Mapping of every token to its id."""
        found: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return found

    @property
    def special_ids(self) -> set[int]:
        """Ids of the special tokens, which no text has."""
        return {id for id, token in self.backend.get_added_tokens_decoder().items() if token.special}

    @property
    def added(self) -> dict[int, str]:
        """Mapping of ids to tokens that are matched literally, such as special tokens."""
        return {id: token.content for id, token in self.backend.get_added_tokens_decoder().items()}

    def _id(self, name: str) -> int | None:
        return self.backend.token_to_id(self.special[name]) if name in self.special else None

    @classmethod
    def load(
        cls, folder: str | Path, chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder, of a GGUF file, or of a Hugging Face model name.

        `chat_template`: replaces the folder's template, see `custom_template.read_template`. `chat_template_kwargs`:
        see `with_kwargs`. Raises UserError if the folder holds no tokenizer or a damaged one.
        """
        if chat_template_kwargs:
            return cls.load(folder, chat_template).with_kwargs(chat_template_kwargs)
        if chat_template is not None:
            text, name = read_template(chat_template)  # report its errors before reading anything else
            return cls.load(folder).templated(text, name)
        from posttrain.models.adapters.adapter_config import described_in

        folder = checkpoint_folder(folder)
        if is_gguf(folder):
            return _tried(cls(*gguf_tokenizer(folder), f"{folder}: tokenizer.chat_template"))
        described, file = described_in(folder), folder / "tokenizer.json"
        if not file.exists():
            return cls.load(described) if described != folder else _load_with_transformers(folder)  # as PEFT writes it
        text = read_text(file)
        config = read_special(folder / "tokenizer_config.json")
        named = read_special(folder / "special_tokens_map.json")  # older checkpoints name them here
        config = {**{name: named[name] for name in NAMED_TOKENS if name in named}, **config}
        template, name = stored_template(folder, config)
        with refusing(f"{file} is damaged, copy it again"):
            backend = tokenizers.Tokenizer.from_str(text)
            check_ids(backend)
            tokenizer = _tried(cls(backend, config, template, name))
        source = read_json(described / "config.json", optional=True)
        return tokenizer._seeing(ImageProcessor.of(described, source))

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab: int,
        kind: Literal["bpe", "characters"] = "bpe",
        special: Sequence[str] = (),
    ) -> Tokenizer:
        """Train a tokenizer of at most `vocab` tokens; equal texts give equal tokenizers.

        "bpe" is byte-level with digits split one by one: it round-trips every text. "characters" has the most frequent
        characters of the texts and maps all others to "<|unk|>"; in the folder of a qwen2 model transformers reads it
        only through PreTrainedTokenizerFast, as AutoTokenizer assumes Qwen's tokenizer there. Ids 0 and 1 are "<|pad|>"
        and "<|eos|>"; the given special tokens follow. Raises UserError if `vocab` is too small or absurdly large.
        """
        return cls(*trained(texts, vocab, kind, special))

    def encode(self, text: str, start: bool = False) -> list[int]:
        """Return token ids. Special tokens written in the text are recognised.

        start=True: the text opens a context, and gets the tokenizer's prefix, such as a beginning-of-sequence token
        (unless the text already begins with it, as a chat template may render it) and its leading space. start=False:
        the text continues a context, and is encoded without a prefix.

        Raises UserError if the text cannot be encoded: a lone surrogate, or a character that the tokenizer lacks.
        """
        if self.pictures is not None and self._placeholder in text:
            raise PictureError(
                f"a text has {self._placeholder}, the placeholder of a picture: give the picture as a part"
            )
        return self._encode(text, start)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Check given token ids. Raises PictureError for a picture's placeholder, since no picture comes with them."""
        if self.pictures is not None and self.pictures.id in tokens:
            raise PictureError(
                f"token {self.pictures.id} is the placeholder of a picture: give messages, with the picture as a part"
            )

    def encode_seen(self, text: str, digests: Sequence[str], start: bool = False) -> tuple[list[int], list[Media]]:
        """Encode a rendered text with pictures. Return the ids, and the span of placeholders of each picture.

        Raises PictureError for an invalid picture, UserError if the model is text-only, or if the template has no
        placeholders for pictures.
        """
        if self.pictures is None:
            raise UserError(BLIND)
        found = text.count(self._placeholder)
        if found > len(digests):
            raise PictureError(
                f"a text has {self._placeholder}, the placeholder of a picture: give the picture as a part"
            )
        if found < len(digests):
            raise UserError(
                f"{self.template_name} shows {found} places for {len(digests)} pictures: use the template of a "
                "vision-language model"
            )
        pixels = [self.pictures.pixels(digest) for digest in digests]
        shown, *rest = text.split(self._placeholder)
        for one, behind in zip(pixels, rest, strict=True):
            shown += one.text.replace(PLACE, self._placeholder) + behind
        tokens, id = self._encode(shown, start), self.pictures.id
        places = [place for place, token in enumerate(tokens) if token == id]
        if len(places) != (needed := sum(one.count for one in pixels)):
            raise UserError(
                f"the tokenizer gives {len(places)} placeholders for pictures that need {needed}: {self._placeholder!r} is "
                f"not the token {id} that config.json names"
            )
        media, first = [], 0
        for digest, one in zip(digests, pixels, strict=True):
            begin, end = places[first], places[first + one.count - 1] + 1
            media.append(Media(begin, end - begin, digest, one.grid))
            first += one.count
        return tokens, media

    @property
    def _placeholder(self) -> str:
        assert self.pictures is not None
        return self.backend.id_to_token(self.pictures.id) or PLACE

    def _seeing(self, pictures: ImageProcessor | None) -> Tokenizer:
        """Set the image processor of a vision-language model, and return the tokenizer itself."""
        self.pictures = pictures
        return self

    def _encode(self, text: str, start: bool) -> list[int]:
        try:
            backend = self.backend if start else self._continuation
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            shown = ascii(text) if len(str(text)) <= 60 else f"{str(text)[:60]!a}..."
            raise failed(error, f"the tokenizer cannot encode the text {shown}") from None
        if not start:
            return ids
        return ids if ids[: len(self._opening)] == self._opening else self._opening + ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens within a context: special tokens visible, a leading space kept."""
        try:
            return self._continuation.decode(tokens, skip_special_tokens=False)
        except BaseException as error:
            raise failed(error, "the tokenizer cannot decode its own tokens") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        generation: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render chat messages with the chat template; generation=True adds the opening of the model's reply.

        `tools`: JSON schemas of functions that the model may call. Raises UserError if there is no template, or if the
        template refuses the messages or does not show the tools or a call.
        """
        if self.chat_template is None:
            raise UserError(
                "this model has no chat template, which messages and tools need: give one with --chat-template FILE or "
                "--chat-template chatml, or use text prompts"
            )
        if any(message.get("tool_calls") for message in messages):
            messages = with_calls(messages, self.tool_format)
        text = self._shown(messages, generation, tools)
        for tool in tools or ():
            if tool["function"]["name"] not in text:
                raise UserError(
                    f"this chat template does not show the tool {tool['function']['name']!r}: use one that does "
                    "(--chat-template chatml), or describe the tool in a message and leave it out of tools"
                )
        check_shown(messages, text)
        return text

    def _shown(
        self,
        messages: Sequence[Mapping[str, Any]],
        generation: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return messages as the template shows them, calls of tools as they are."""
        return self._rendered(self._with_reasoning(messages), generation, self._takes_parts, tools)

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format of tool calls in the chat template; None if it shows none."""
        if self.chat_template is None:
            return None
        if self.chat_template not in self._formats:
            self._formats[self.chat_template] = format_of(self._shown)
        return self._formats[self.chat_template]

    def closes_with(self, ends: Collection[int]) -> bool:
        """Return whether the chat template puts one of these tokens behind a reply.

        The template of an instruct model does so with the model's EOS tokens. A base model with the template of its
        instruct sibling ends texts with another token.
        """
        if self.chat_template is None:
            return False
        said = [{"role": "user", "content": WORD}, {"role": "assistant", "content": MARK}]
        try:
            _, found, behind = self.render(said, generation=False).rpartition(MARK)
            tokens = self.encode(behind) if found else []
        except UserError:  # the template requires other messages
            return False
        return next((token for token in tokens if self.decode([token]).strip()), None) in ends

    def render_after(
        self,
        before: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        calls: Sequence[ToolCall] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Continuation:
        """Return the text that the template renders between the reply to `before` and the reply to `new`.

        `calls`: the tool calls of the first reply, at whose end the text begins. A template may render earlier messages
        differently than when the model read them (it may drop the thinking of earlier turns): only the text behind the
        reply is used. Raises UserError if the template does not show a reply unchanged, or does not show a new message.
        """
        return rendered_continuation(
            lambda shown: self.render(shown, True, tools), self.tool_format, before, new, calls
        )

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        generation: bool,
        parts: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        from posttrain.models.tokenizer.chat_template import render

        assert self.chat_template is not None
        shown = [_in_parts(message) if parts else _in_text(message) for message in messages]
        if self.pictures is None and any(has_parts(message.get("content")) for message in messages):
            raise UserError(BLIND)
        variables: dict[str, Any] = {"messages": shown, **self.special}
        variables |= {"tools": tools and list(tools), "documents": None, "add_generation_prompt": generation}
        variables |= self.chat_template_kwargs
        return render(self.chat_template, variables, self.template_name, self.day)

    @property
    def _takes_parts(self) -> bool:
        """Whether the template expects contents as lists of parts instead of text, as those of vision-language models
        do.
        """
        assert self.chat_template is not None
        if self.chat_template not in self._parts:
            asked, found = [{"role": "user", "content": WORD}], {}
            for parts in (False, True):
                try:
                    found[parts] = WORD in self._rendered(asked, True, parts)
                except UserError:  # `render` reports the template's other requirements
                    found[parts] = False
            self._parts[self.chat_template] = found[True] and not found[False]
        return self._parts[self.chat_template]

    @property
    def reasoning_name(self) -> str | None:
        """Key under which the template reads a message's thoughts (see `thoughts.REASONING`); None: it reads none."""
        assert self.chat_template is not None
        if self.chat_template not in self._reasoning:
            asked, found = [{"role": "user", "content": "a question"}], None
            for name in REASONING:
                said = {"role": "assistant", "content": "an answer", name: WORD}
                with suppress(UserError):
                    if WORD in self._rendered([*asked, said], False, self._takes_parts):
                        found = name
                        break
            self._reasoning[self.chat_template] = found
        return self._reasoning[self.chat_template]

    def _with_reasoning(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the messages with their thoughts under the name that the template reads."""
        if all(reasoning_of(message) is None for message in messages) or self.reasoning_name is None:
            return messages
        said = [(message, reasoning_of(message)) for message in messages]
        return [m if text is None else {**without_reasoning(m), self.reasoning_name: text} for m, text in said]

    def templated(self, template: str, name: str) -> Tokenizer:
        """Return a copy with another chat template. `name`: the template's file, named in messages."""
        config = {key: value for key, value in self.config.items() if key not in ("chat_template", KWARGS_KEY)}
        return Tokenizer(self.backend, config, template, name)._seeing(self.pictures)

    def with_row(self, given: Mapping[str, Any]) -> Tokenizer:
        """Return a copy whose chat template also gets the variables of a row. Raises UserError as `with_kwargs`."""
        key = json.dumps(given, sort_keys=True, default=str)
        if key not in self._of_rows:
            if len(self._of_rows) >= MOST_OF_ROWS:
                self._of_rows.clear()
            self._of_rows[key] = self.with_kwargs(given, f"column {KWARGS_KEY}")
        return self._of_rows[key]

    def with_kwargs(self, given: Mapping[str, Any], by: str = "--chat-template-kwargs") -> Tokenizer:
        """Return a copy whose chat template also gets these variables; `save` stores them. `by`: names their origin.

        Raises UserError for a variable that the template does not read.
        """
        if not given:
            return self
        if self.chat_template is None:
            raise UserError(
                "--chat-template-kwargs needs a chat template, and this model has none: give one with --chat-template"
            )
        known = self.template_variables
        for name in given:
            if name not in known:
                listed = f"it reads: {', '.join(known)}" if known else "it has no variables"
                raise UserError(f"{by}: {self.template_name} does not read {name[:60]!r}{near(name, known)} ({listed})")
        other = copy(self)  # with the same backend
        other.config = {**self.config, KWARGS_KEY: {**self.chat_template_kwargs, **given}}
        other._reasoning, other._of_rows = {}, {}  # a variable may turn thoughts on
        return other

    def padding(self, ends: Sequence[int]) -> Tokenizer:
        """Return a copy with a padding token that is none of `ends`: an existing special token, or else a new one.

        Otherwise programs that look for the last token of a padded row would miss the end of a reply. If the tokenizer
        has no EOS token, the first of `ends` becomes its EOS token.
        """
        named = {} if self.eos_id is not None else {"eos_token": self.backend.id_to_token(ends[0])}
        if self.pad_id is not None and self.pad_id not in ends:
            config = {**self.config, **named}
            other = Tokenizer(self.backend, config, self.chat_template, self.template_name)
            return other._seeing(self.pictures) if named else self
        usable = ("bos_token", "mask_token", "sep_token", "cls_token", "unk_token")  # the EOS tokens last
        known = [self.special.get(name) for name in usable]
        others = [
            token for token in known if token is not None and self.backend.token_to_id(token) not in (None, *ends)
        ]
        if not others:
            self.backend.add_special_tokens([PAD])
        config = {**self.config, **named, "pad_token": [*others, PAD][0]}
        return Tokenizer(self.backend, config, self.chat_template, self.template_name)._seeing(self.pictures)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, also for transformers.AutoTokenizer.

        For a vision-language model, write the files of its image processor too.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = dict(self.config)
        if run_date.fixed_day() and "strftime_now" in (self.chat_template or ""):
            config[run_date.CONFIG_KEY] = run_date.fixed_day()
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
            config.pop("chat_template", None)
        for name, text in (self.pictures.files if self.pictures is not None else {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        self.backend.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", config)


def _tried(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer after encoding a text of many kinds of characters, so that a panic occurs here and not in
    the middle of a run.
    """
    with suppress(Exception):  # the vocabulary may lack some of the characters
        ids = tokenizer.backend.encode("Ab 12,\n\t\N{LATIN SMALL LETTER E WITH ACUTE}\u5317\U0001f642").ids
        tokenizer.backend.decode(ids, skip_special_tokens=False)
    return tokenizer


def _load_with_transformers(folder: Path) -> Tokenizer:
    """Load the tokenizer of an older checkpoint (vocab.json and merges.txt, or a SentencePiece model), converted by
    transformers.
    """
    if not any((folder / name).exists() for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json")):
        raise UserError(f"{folder} holds no tokenizer: copy tokenizer.json and tokenizer_config.json into it")
    config = read_special(folder / "tokenizer_config.json")
    with refusing(f"{folder} has no tokenizer.json, and its tokenizer cannot be converted"):
        from transformers import AutoTokenizer

        # never run code of a checkpoint; by default transformers would ask the user, and wait for an answer
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        backend = found.backend_tokenizer
        check_ids(backend)
    # the converted tokenizer.json is saved, so the class must not be one that reads the old files
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return Tokenizer(backend, config, *stored_template(folder, config))
