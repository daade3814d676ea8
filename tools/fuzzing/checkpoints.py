"""Damaged checkpoints: tokenizers, config.json, generation_config.json, weights, their index, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import templates, weights
from fuzzing.case import Case
from fuzzing.mutate import damage_file, is_json_object, is_same, mutated, write_json
from fuzzing.samples import CHECKPOINTS, REWARD, chats, copy, questions, rows, write_rows
from fuzzing.usual import CHAT, EVAL, RL, SCRATCH, SFT

USES = ("eval",) * 7 + ("chat", "sft", "rl")


def use(random: Random, place: Path, model: str, verb: str | None = None, text: bool = False) -> tuple[list[str], str]:
    """A short command that needs every file of a checkpoint -> (words, what is typed). `text`: with plain prompts."""
    chat = model in ("chat", "old") and not text
    verb = verb or random.choice(USES)
    write_rows(place / "rows.jsonl", (chats() if verb in ("sft", "tokenizer") else questions()) if chat else rows())
    (place / "env.py").write_text(REWARD)
    if verb == "chat":
        return ["chat", model, *CHAT.split()], "1+2=\n\n"
    usual = {
        "eval": f"eval --model {model} {EVAL}",
        "rl": f"rl --model {model} {RL}",
        "sft": f"sft --model {model} {SFT}",
        "tokenizer": f"sft {SCRATCH}".replace("characters", model),
    }
    return usual[verb].split(), ""


def tokenizer(random: Random, place: Path, samples: Path) -> Case:
    name = random.choice(["chat", "chat", "plain"])
    folder = copy(samples, name, place)
    file = random.choice(["tokenizer.json"] * 3 + ["tokenizer_config.json"] * 2 + ["special_tokens_map.json"])
    broken = None
    if name == "plain" and file == "special_tokens_map.json":
        (folder / file).write_text('{"eos_token": "<|eos|>"}')
    if random.random() < 0.25:
        what = damage_file(folder / file, random)
        broken = True if not is_json_object(folder / file) and (folder / file).exists() else None
    else:
        document = json.loads((folder / file).read_text())
        document, path, what = mutated(document, random)
        write_json(folder / file, document)
        if file != "tokenizer.json" and len(path) == 1 and str(path[0]) in ("eos_token", "pad_token", "unk_token"):
            broken = None if _is_token(document.get(path[0])) else True
    words, typed = use(random, place, name, random.choice([*USES[5:], "tokenizer"]))
    return Case(words, f"{name}/{what}", broken, (file,) if broken else (), typed)


def old_tokenizer(random: Random, place: Path, samples: Path) -> Case:
    folder = copy(samples, "old", place)
    file = random.choice(["vocab.json", "merges.txt", "tokenizer_config.json"])
    if file != "merges.txt" and random.random() < 0.5:
        document, _, what = mutated(json.loads((folder / file).read_text()), random)
        write_json(folder / file, document)
    else:
        what = damage_file(folder / file, random)
    if random.random() < 0.15:
        (folder / "tokenizer.model").write_bytes(random.randbytes(random.randrange(200)))
        what += ", a tokenizer.model of noise"
    words, typed = use(random, place, "old", "eval")
    return Case(words, f"old/{what}", None, (), typed)


def _is_token(value: Any) -> bool:
    return (
        value is None or isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))
    )


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _true_or_false(value: Any) -> bool:
    return value is None or type(value) is bool


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
ALLOWED: dict[str, Callable[[Any], bool]] = {
    "model_type": lambda value: isinstance(value, str),
    "hidden_act": lambda value: value == "silu",
    "rms_norm_eps": lambda value: type(value) in (int, float) and 0 <= value < 1e300,
    "max_position_embeddings": _whole(1, 2**40),
    "num_key_value_heads": lambda value: value is None or _whole(1, 2)(value),
    "head_dim": lambda value: value is None or value == 8,
    "sliding_window": lambda value: value is None or _whole(0, 2**40)(value),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), _true_or_false),
    **dict.fromkeys(SIZES, lambda value: type(value) is int and value > 0),
}
"""What a key of config.json may hold at all; outside of it, every reader must refuse."""


def config(random: Random, place: Path, samples: Path) -> Case:
    name = random.choice(CHECKPOINTS)
    folder = copy(samples, name, place)
    file = folder / "config.json"
    broken: bool | None = None
    if random.random() < 0.15:
        what = damage_file(file, random)
        broken = None if is_json_object(file) else True
    else:
        document = json.loads(file.read_text())
        before = json.loads(file.read_text())
        for _ in range(random.choice([1, 1, 1, 2])):
            document, path, what = mutated(document, random)
        if random.random() < 0.3:
            path, what = _absurd(document, random)
        write_json(file, document)
        key = str(path[0])
        if key in SIZES and document.get(key) != before[key]:
            broken = True
        elif key in ALLOWED and key in document and not ALLOWED[key](document[key]):
            # a family without this option may leave it unread
            broken = None if key in ("sliding_window", "mlp_bias", "attention_bias") else True
    words, typed = use(random, place, name, "rl" if random.random() < 0.02 else random.choice(USES[5:9]))
    return Case(words, f"{name}/{what}", broken, ("config.json",) if broken else (), typed)


def _absurd(document: dict[str, Any], random: Random) -> tuple[tuple[str, ...], str]:
    """Shapes that no machine holds, or that are no shapes."""
    key = random.choice([*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"])
    value = random.choice([0, -1, 1, 3, 10**4, 10**5, 10**6, 10**7, 10**9, 10**12, 10**15, 10**18, 2**63, 10**40])
    document[key] = value
    if random.random() < 0.2:
        document["hidden_size"] = document["intermediate_size"] = 10**6
    return (key,), f"{key}: {value}"


def generation(random: Random, place: Path, samples: Path) -> Case:
    name = random.choice(["plain", "chat"])
    folder = copy(samples, name, place)
    file = folder / "generation_config.json"
    broken: bool | None = None
    if random.random() < 0.25:
        what = damage_file(file, random)
        broken = True if file.is_file() and not is_json_object(file) else None
    else:
        document = json.loads(file.read_text())
        ids = [
            0,
            1,
            2,
            -1,
            62,
            10**9,
            1.0,
            1.5,
            "1",
            None,
            True,
            [],
            [[1]],
            [1, 1],
            [1, -1],
            [1, "2"],
            [1, None],
            {},
            2**63,
        ]
        if random.random() < 0.6:
            document["eos_token_id"] = random.choice(ids)
            what = f"eos_token_id: {document['eos_token_id']}"
        else:
            document, _, what = mutated(document, random)
        write_json(file, document)
        if "eos_token_id" in document:
            eos = document["eos_token_id"]
            listed = eos if isinstance(eos, list) and eos else [eos]
            broken = None if eos is None else not all(_whole(0, 2**30)(id) for id in listed)
    words, typed = use(random, place, name, random.choice(USES[5:9]))
    return Case(words, f"{name}/{what}", broken or None, (file.name,) if broken else (), typed)


def stored_weights(random: Random, place: Path, samples: Path) -> Case:
    name = random.choice(CHECKPOINTS)
    folder = copy(samples, name, place)
    file = random.choice(sorted(folder.glob("*.safetensors")))
    said: tuple[str, ...]
    if random.random() < 0.25:
        what = damage_file(file, random)
        broken, said = None if what.endswith(("changed", "CRLF", "UTF-8")) else True, (file.name, "tensors")
        said = (*said, "model.safetensors") if broken else ()
        broken = None if is_same(file, samples / name / file.name) else broken
    else:
        what, broken, said = weights.damaged(file, random)
    words, typed = use(random, place, name, random.choice(USES[5:9]))
    codes = (0, 2, 3)  # 3: no update could be made, as gradients are not finite
    return Case(words, f"{name}/{file.name}: {what}", broken, said if broken else (), typed, codes)


def index(random: Random, place: Path, samples: Path) -> Case:
    folder = copy(samples, "shards", place)
    file = folder / "model.safetensors.index.json"
    broken = None
    if random.random() < 0.4:
        what = damage_file(file, random)
        broken = None if is_json_object(file) else True
    else:
        document = json.loads(file.read_text())
        document, _, what = mutated(document, random)
        if random.random() < 0.5:
            tensor = random.choice(list(json.loads(file.read_text())["weight_map"]))
            to = random.choice(
                [None, 5, [], {}, "", "nowhere.safetensors", "../plain", "config.json", ".", "/dev/null", "\0"]
            )
            document = json.loads(file.read_text())
            document["weight_map"][tensor], what, broken = to, f"{tensor} in {to!r}", True
        write_json(file, document)
    words, typed = use(random, place, "shards", "eval")
    return Case(words, f"shards/{what}", broken, ("index", "lacks", "safetensors") if broken else (), typed)


def critic(random: Random, place: Path, samples: Path) -> Case:
    copy(samples, "plain", place)
    folder = copy(samples, "score", place)
    file = random.choice(["model.safetensors", "model.safetensors", "config.json", "critic"])
    broken, said = None, ()
    if file == "config.json":
        document, _, what = mutated(json.loads((folder / file).read_text()), random)
        write_json(folder / file, document)
    elif file == "critic":
        (folder / "training").mkdir()
        header = {"weight": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}
        header["bias"] = {"dtype": "F32", "shape": [], "data_offsets": [64, 68]}
        stored = folder / "training" / "critic.safetensors"
        weights.write(stored, header, bytes(68))
        what, broken, said = (
            weights.damaged(stored, random) if random.random() < 0.5 else (damage_file(stored, random), None, ())
        )
        broken = None  # tensors of other names are a critic of another kind: a fresh one is made
    else:
        what, broken, said = weights.damaged(folder / file, random)
    words, _ = use(random, place, "plain", "rl")
    return Case([*words, "--algorithm", "ppo", "--critic-model", "score"], f"score/{what}", broken, said)


def template(random: Random, place: Path, samples: Path) -> Case:
    folder = copy(samples, "chat", place)
    broken: bool | None = None
    how = random.randrange(10)
    if how < 4:
        text, what, broken = random.choice(templates.ENDLESS), "endless", True
    elif how < 5:
        text, what = random.choice(templates.BROKEN), "broken"
    elif how < 6:
        text, what = random.choice(templates.HARMLESS), "harmless"
    elif how < 9:
        text, what = templates.random_template(random), "random"
    else:
        text, what = (
            str(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template") or ""),
            "damaged",
        )
        text = text or (folder / "chat_template.jinja").read_text()
    file = folder / "chat_template.jinja"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if random.random() < 0.3 and what != "damaged":
        file.unlink(missing_ok=True)
        named = [{"name": "default", "template": text}, {"name": "tool_use", "template": "x"}]
        config["chat_template"] = random.choice([text, named])
        write_json(folder / "tokenizer_config.json", config)
    else:
        file.write_text(text, encoding="utf-8")
    if what == "damaged":
        what = damage_file(file, random)
    words, typed = use(random, place, "chat", random.choice(USES[3:9]))
    shown = text if len(text) < 200 else text[:200] + "..."
    return Case(
        words, f"{what} template {shown!r}", broken, ("chat template", "chat_template") if broken else (), typed
    )


def real_template(random: Random, place: Path, samples: Path) -> Case:
    """A template that a public model ships, with random conversations: it must render or refuse in its own words."""
    folder = copy(samples, "chat", place)
    shipped = sorted((Path(__file__).resolve().parents[3] / "shared" / "data" / "templates").glob("*.jinja"))
    text = random.choice(shipped).read_text() if shipped else templates.HARMLESS[4]
    (folder / "chat_template.jinja").write_text(text)
    words, typed = use(random, place, "chat", "eval")
    turns = [random.choice(["user", "assistant", "system", "tool"]) for _ in range(random.randrange(5))]
    extra: list[dict[str, Any]] = [
        {},
        {},
        {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"name": "x"},
    ]
    messages = [
        {"role": role, "content": random.choice(["", "hi", "</think>x"]), **random.choice(extra)} for role in turns
    ]
    document: Any = {"id": "a", "messages": [*messages, {"role": "user", "content": "1+1"}], "answer": "2"}
    if random.random() < 0.3:
        document, _, _ = mutated(document, random)
    write_json(place / "rows.jsonl", document)
    return Case(words, f"real template, {turns}", None, (), typed)
