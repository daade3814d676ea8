"""Runs with pictures: parts of messages, files named by their content, what is learned, resumed, and refused."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHATML
from picture_envs import drawn, hostile, looking, message
from picture_tokenizer import TEMPLATE, picture_tokenizer
from PIL import Image
from safetensors.torch import load_file
from tiny_models import make, make_seeing

import posttrain
from posttrain.cli.main import main
from posttrain.cli.merge_command import merge_adapter
from posttrain.core.pictures import MOST_PIXELS, PICTURES, PictureError, Pictures
from posttrain.core.transcripts import Mask
from posttrain.core.types import Invalid, Turn, UserError
from posttrain.envs.builtin.shapes import draw, tasks
from posttrain.envs.demonstration import demonstrate
from posttrain.envs.play.env_outputs import read_turn
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.worker_protocol import Garbled, read_answer, write_answer
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts

transformers = pytest.importorskip("transformers")

HOW: dict[str, Any] = {"threads": 1, "quiet": True}


@pytest.fixture(scope="module")
def reader() -> Tokenizer:
    return picture_tokenizer()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, reader: Tokenizer) -> Callable[[str], Path]:
    place, made = tmp_path_factory.mktemp("seeing"), dict[str, Path]()

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_seeing(kind, place / kind, vocab_size=reader.vocab_size)
            reader.save(made[kind])
        return made[kind]

    return folder


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
def test_tokens_of_tiles_are_those_of_their_processor(kind: str, folders: Callable[[str], Path]) -> None:
    folder = folders(kind)
    own = Tokenizer.load(folder)
    theirs_tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert own.pictures is not None
    images = own.pictures._opened()
    theirs = transformers.Idefics3Processor(images, theirs_tokenizer, image_seq_len=4)
    for size in ((16, 16), (32, 20)):
        data, text = drawn(1, *size), "look <image> and <image>?"
        seen = Image.open(io.BytesIO(data)).convert("RGB")
        expected = theirs(text=[text], images=[[seen, seen]], add_special_tokens=False)["input_ids"][0]
        tokens, media = own.encode_seen(text, [PICTURES.hold(data)] * 2)
        assert tokens == list(expected)
        assert [tokens[m.start] for m in media] == [tokens[m.start + m.length - 1] for m in media] == [5, 5]
        assert sum(tokens[m.start : m.start + m.length].count(5) for m in media) == tokens.count(5)


@pytest.mark.parametrize("mask", ["assistant", "all"])
def test_places_of_pictures_are_shown_and_never_learned(mask: Mask, folders: Callable[[str], Path]) -> None:
    tokenizer, digest = Tokenizer.load(folders("qwen2_5_vl")), PICTURES.hold(drawn(2))
    said = [
        message("one ", (f"sha256:{digest}",), " two"), {"role": "assistant", "content": "yes"},
        message((f"sha256:{digest}",), "more"), {"role": "assistant", "content": "no"},
    ]  # fmt: skip
    made = demonstrate({"messages": said}, tokenizer, (1,), mask)
    assert len(made.media) == 2 and made.positions is not None
    places = [place for m in made.media for place in range(m.start, m.start + m.length)]
    assert [made.tokens[place] for place in places] == [5] * 8 == [t for t in made.tokens if t == 5]
    assert not set(places) & set(made.scored.tolist())
    text = tokenizer.decode([made.tokens[place] for place in made.scored])
    assert text == ("yes<|eos|>no<|eos|>" if mask == "assistant" else text) and "yes<|eos|>" in text
    assert tokenizer.decode(made.tokens).replace("<image>" * 4, "<image>") == tokenizer.render(said, False)


# -- runs --------------------------------------------------------------------------------------------------------------


TASKS = [{"id": str(shade), "shade": shade} for shade in range(0, 250, 25)]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("qwen3_vl", {"env_workers": 1}, marks=pytest.mark.long),
        ("smolvlm", {"async_steps": 1, "env_workers": 0}),
    ],
)
def test_run_with_pictures_learns_and_goes_on_exactly(
    kind: str, more: dict[str, Any], tmp_path: Path, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = dict(
        model=str(folders(kind)), prompts=3, group=4, max_tokens=5, lr=5e-3, save_every=2, kl=0.01, minibatches=2,
        **HOW, **more,
    )  # fmt: skip
    for name in ("whole", "parts"):
        posttrain.rl(TASKS, looking, steps=4, out=str(tmp_path / name), **how)
    whole = (tmp_path / "parts/metrics.jsonl").read_bytes()
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == whole
    shutil.rmtree(tmp_path / "parts/checkpoints/step-000004")
    monkeypatch.setattr(PICTURES, "_held", {})  # as in a process of its own
    monkeypatch.setattr(PICTURES, "_others", [])
    posttrain.rl(TASKS, looking, steps=4, out=str(tmp_path / "parts"), resume=True, **how)
    assert (tmp_path / "parts/metrics.jsonl").read_bytes() == whole
    last = "checkpoints/step-000004"
    stored = [load_file(tmp_path / name / last / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch_equal(stored[1][name], tensor) for name, tensor in stored[0].items())
    start = load_file(folders(kind) / "model.safetensors")
    moved = {name for name, tensor in stored[0].items() if not torch_equal(tensor, start[name])}
    text = {name for name in start if "language_model" in name or "text_model" in name or "lm_head" in name}
    assert moved and moved <= text
    rollouts = read_rollouts(tmp_path / "parts", 3)
    named = {name for r in rollouts for name in r["media"]}
    assert named and named <= {file.name for file in (tmp_path / "parts/pictures").iterdir()}
    assert all(r["prompt"].count("sha256:") == 1 for r in rollouts)


def torch_equal(one: Any, other: Any) -> bool:
    return bool((one == other).all())


def test_sft_reads_paths_bytes_and_images_from_rows_and_files(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(drawn(3))
    images: list[Any] = [str(path), path, path.read_bytes(), Image.open(path)]
    rows = [
        {"messages": [message("what?", (image,)), {"role": "assistant", "content": str(n)}]}
        for n, image in enumerate(images)
    ]
    how = dict(model=str(folders("qwen2_5_vl")), steps=2, rows=2, **HOW)
    posttrain.sft(rows, out=str(tmp_path / "rows"), train_vision=True, **how)
    kept = sorted((tmp_path / "rows/pictures").iterdir())
    assert path.read_bytes() in [file.read_bytes() for file in kept] and len(kept) <= 2  # PNG again, of the opened one
    trained, start = (
        load_file(f / "model.safetensors") for f in (tmp_path / "rows/checkpoints/step-000002", Path(how["model"]))
    )
    assert any(not torch_equal(tensor, start[name]) for name, tensor in trained.items() if "visual" in name)
    lines = [
        json.dumps({"messages": [message("what?", (str(path),)), {"role": "assistant", "content": str(n)}]})
        for n in range(4)
    ]
    text = json.dumps({"messages": [{"role": "user", "content": "no picture"}, {"role": "assistant", "content": "5"}]})
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, text]))
    run = posttrain.sft(str(tmp_path / "rows.jsonl"), out=str(tmp_path / "file"), **how)
    assert [file.name for file in (tmp_path / "file/pictures").iterdir()] == [PICTURES.hold(path.read_bytes())]
    again = load_model(run.path / "checkpoints/step-000002")
    assert again.vision is not None and again.vision.processor.files  # type: ignore[attr-defined]


def test_evaluation_looks(folders: Callable[[str], Path]) -> None:
    how = dict(samples=2, max_tokens=3, threads=1, env_workers=0)
    seeing = posttrain.evaluate(tasks(4), "shapes", str(folders("smolvlm")), **how)  # type: ignore[arg-type]
    assert all(t.media for r in seeing.rollouts for t in r.transcripts)
    blind = posttrain.evaluate(tasks(4, blind=True), "shapes", str(folders("smolvlm")), **how)  # type: ignore[arg-type]
    assert not any(t.media for r in blind.rollouts for t in r.transcripts)
    assert [r.task["question"] for r in seeing.rollouts] == [r.task["question"] for r in blind.rollouts]


def test_rewards_of_rows_with_pictures_are_learned_from(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    rows = [{"id": str(n), "messages": [message((drawn(n),), "?")], "answer": "1"} for n in range(4)]
    run = posttrain.rl(
        rows, lambda task, reply: float("1" in reply), str(folders("idefics3")), steps=1, prompts=2, group=4, max_tokens=4,
        env_workers=1, out=str(tmp_path), **HOW,
    )  # fmt: skip
    assert len(list((tmp_path / "pictures").iterdir())) == 4 and run.metrics


def test_preferences_about_a_picture_are_learned(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    rows = [{"messages": [message((drawn(n),), "?")], "chosen": "yes", "rejected": "no"} for n in range(4)]
    run = posttrain.prefer(rows, str(folders("qwen3_vl")), steps=2, rows=2, out=str(tmp_path), **HOW)
    assert len(list((tmp_path / "pictures").iterdir())) == 4 and run.metrics[0]["loss"] == pytest.approx(np.log(2))


def test_model_of_text_is_not_asked_about_pictures(folders: Callable[[str], Path], tmp_path: Path) -> None:
    rows = [{"id": str(n), "messages": [message((drawn(n),), "?")]} for n in range(4)]
    blind = tmp_path / "blind"
    make("qwen3", blind, vocab_size=Tokenizer.load(folders("smolvlm")).vocab_size)
    Tokenizer.load(folders("smolvlm")).save(blind)
    how = dict(teacher=str(blind), steps=1, prompts=2, max_tokens=3, env_workers=0, out=str(tmp_path / "out"), **HOW)
    with pytest.raises(UserError, match="is text-only, and the batch has pictures"):
        posttrain.distill(rows, model=str(folders("smolvlm")), **how)


# -- what is refused ---------------------------------------------------------------------------------------------------


def giant(side: int) -> bytes:
    """A PNG of so many pixels a side, a few bytes long."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


HOSTILE: list[tuple[Any, str]] = [
    (giant(20_000), f"more than {MOST_PIXELS:,} pixels"),
    (giant(9_000), f"9,000 x 9,000 pixels, at most {MOST_PIXELS:,} are allowed"),
    (b"", "not a readable picture"),
    (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "not a readable picture"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a readable picture"),
    ("nowhere.png", "cannot be read"),
    ("a\0b", "cannot be read"),
    (3, "expected a path, the bytes of a file, or a PIL image"),
]


@pytest.mark.parametrize(("image", "message_"), HOSTILE)
def test_what_is_no_picture_is_refused_in_one_line(image: Any, message_: str) -> None:
    with pytest.raises(PictureError, match=message_) as caught:
        PICTURES.put(image)
    assert "\n" not in str(caught.value)
    found = read_turn(Turn(messages=[message("a", (image,))]))
    assert isinstance(found, Invalid) and message_ in found.reason


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_has_no_end_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(PictureError, match=r"is a .*, not a file"):
        PICTURES.put(str(path))


def test_a_picture_that_breaks_off_is_refused_when_it_is_looked_at(folders: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.load(folders("smolvlm"))
    name = PICTURES.put(drawn(5, 64, 64)[:2000])
    with pytest.raises(PictureError, match=r"the picture sha256:\w{12}\.\.\. is damaged"):
        tokenizer.encode_seen("<image>", [name.removeprefix("sha256:")])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "audio", "audio": "a.wav"}], "part of the type 'audio' .*use text or image"),
        ([{"type": "video", "video": "a.mp4"}], "part of the type 'video'"),
        ([{"type": "image"}], "has the part"),
        ([{"type": "image", "image": b"no"}, "text"], "not a readable picture"),
    ],
)
def test_parts_that_are_not_read_are_refused(
    content: Any, said: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": content}]
    row = {"messages": [*messages, {"role": "assistant", "content": "x"}]}
    with pytest.raises(UserError, match=said) as caught:
        posttrain.sft([row], model=str(folders("smolvlm")), out=str(tmp_path), steps=1, **HOW)
    assert "\n" not in str(caught.value)
    assert isinstance(read_turn(Turn(messages=messages)), Invalid)


def test_pictures_that_a_model_cannot_see_are_refused(
    folders: Callable[[str], Path], tmp_path: Path, reader: Tokenizer
) -> None:
    rows = [{"messages": [message("what?", (drawn(1),)), {"role": "assistant", "content": "1"}]}]

    def refused(folder: Path, said: str) -> None:
        with pytest.raises(UserError, match=said) as caught:
            posttrain.sft(rows, model=str(folder), out=str(tmp_path / "out"), steps=1, overwrite=True, **HOW)
        assert "\n" not in str(caught.value)

    blind = make("qwen3", tmp_path / "blind", vocab_size=reader.vocab_size)
    reader.save(blind)
    refused(blind, "this model is text-only")
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    for file in folders("qwen2_5_vl").iterdir():
        if file.name != "preprocessor_config.json":
            (lacking / file.name).write_bytes(file.read_bytes())
    refused(lacking, "holds no image processor .*copy it there")
    assert load_model(lacking).config.vocab == reader.vocab_size  # text alone it reads
    (lacking / "preprocessor_config.json").write_text("{}")
    refused(lacking, "cannot read the pictures of its image processor")
    (lacking / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Nobody"}))
    refused(lacking, "transformers cannot open preprocessor_config.json")
    other = json.loads((folders("qwen2_5_vl") / "preprocessor_config.json").read_text()) | {"merge_size": 1}
    (lacking / "preprocessor_config.json").write_text(json.dumps(other))
    refused(lacking, "merges 1 patches a side, and the model 2")
    (lacking / "preprocessor_config.json").write_bytes(
        (folders("qwen2_5_vl") / "preprocessor_config.json").read_bytes()
    )
    (lacking / "chat_template.jinja").write_text(TEMPLATE.replace("<image>", "picture"))
    refused(lacking, "shows 0 places for 1 pictures")


@pytest.mark.parametrize(
    ("id", "said"), [(9999, "token 9999 is .* vocabulary ends at"), (2, "no reply would ever end")]
)
def test_placeholders_that_can_be_none_are_refused(
    id: int, said: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(folders("smolvlm"), tmp_path / "other")
    file = tmp_path / "other/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_token_id": id}))
    with pytest.raises(UserError, match=said):
        load_model(file.parent)


def test_text_that_stands_for_a_picture_is_refused(folders: Callable[[str], Path], reader: Tokenizer) -> None:
    tokenizer, digest = Tokenizer.load(folders("qwen3_vl")), PICTURES.hold(drawn(1))
    for text, pictures in (("a <image>", []), ("<image><image>", [digest])):
        with pytest.raises(PictureError, match="a text has <image>, the placeholder of a picture"):
            tokenizer.encode_seen(text, pictures)
    with pytest.raises(PictureError, match="a text has <image>"):
        tokenizer.encode("say <image>")
    with pytest.raises(PictureError, match="token 5 is the placeholder of a picture"):
        tokenizer.check_tokens([4, 5])


def test_a_conversation_says_why_it_ends(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("<image> hi\n"))
    assert main(["chat", str(folders("smolvlm"))]) == 2
    assert "the conversation ends here" in capsys.readouterr().err


def test_hostile_pictures_end_the_episode_and_not_the_run(folders: Callable[[str], Path]) -> None:
    rows = [{"id": how, "how": how} for how in ("fine", "text", "cut", "tokens")]
    found = posttrain.evaluate(
        rows, hostile, str(folders("qwen2_5_vl")), samples=1, max_tokens=3, threads=1, env_workers=1
    )
    rewards = {r.task["id"]: r.reward for r in found.rollouts}
    assert rewards["fine"] == 1.0
    reasons = {id: reward.reason for id, reward in rewards.items() if isinstance(reward, Invalid)}
    assert "the placeholder of a picture" in reasons["text"] and "the placeholder of a picture" in reasons["tokens"]
    assert "is damaged" in reasons["cut"]


def test_a_worker_cannot_have_a_file_read_or_a_picture_renamed(tmp_path: Path) -> None:
    turn = read_turn(Turn(messages=[message("a", (drawn(7),))]))
    assert isinstance(turn, Turn)
    answer = json.loads(write_answer(1, turn)[8:])
    assert read_answer(json.dumps(answer).encode()).event == turn  # type: ignore[union-attr]
    [(digest, data)] = answer["pictures"].items()
    (tmp_path / "secret.png").write_bytes(drawn(8))
    for change in (
        {"pictures": {"0" * 64: data}}, {"pictures": {digest: "!"}}, {"pictures": {digest: "AAAA"}}, {"pictures": [1]},
        {"turn": {**answer["turn"], "messages": [message((str(tmp_path / "secret.png"),))]}},
    ):  # fmt: skip
        with pytest.raises(Garbled):
            read_answer(json.dumps({**answer, **change}).encode())


# -- where they lie ----------------------------------------------------------------------------------------------------


def test_a_picture_whose_file_is_gone_is_read_from_where_it_is_given_again(tmp_path: Path) -> None:
    pictures, places = Pictures(), [tmp_path / "a.png", tmp_path / "b.png"]
    for place in places:
        place.write_bytes(drawn(1))
    name = pictures.put(places[0]).removeprefix("sha256:")
    places[0].unlink()
    assert pictures.put(places[1]) == f"sha256:{name}" and pictures.read(name) == drawn(1)


def test_a_picture_is_what_its_name_says_wherever_it_lies(tmp_path: Path) -> None:
    pictures, path = Pictures(), tmp_path / "a.png"
    path.write_bytes(drawn(1))
    pictures.begin(tmp_path / "run/pictures")
    one, two = pictures.put(path), pictures.put(drawn(2))
    path.write_bytes(drawn(3))
    with pytest.raises(PictureError, match="has changed since its hash was taken"):
        pictures.read(one.removeprefix("sha256:"))
    path.write_bytes(drawn(1))
    pictures.keep(tmp_path / "run/pictures")
    three = pictures.put(drawn(3))
    pictures.end()
    pictures.put(drawn(4))
    files = {f"sha256:{file.name}": file.read_bytes() for file in (tmp_path / "run/pictures").iterdir()}
    assert files == {one: drawn(1), two: drawn(2), three: drawn(3)}
    path.unlink()
    other = Pictures()
    other.begin(tmp_path / "run/pictures")
    assert [other.read(name.removeprefix("sha256:")) for name in files] == list(files.values())
    with pytest.raises(PictureError, match="there is no picture sha256:000000000000"):
        other.read("0" * 64)


def test_shapes_are_drawn_from_the_task_and_guessing_wins_what_it_should() -> None:
    rows = tasks(3000, 5)
    assert rows == tasks(3000, 5) and not {r["id"] for r in rows} & {r["id"] for r in tasks(300, 5, held_out=True)}
    assert draw(rows[0]["drawing"]) == draw(rows[0]["drawing"])
    by_question: dict[str, list[str]] = {}
    for row in rows:
        by_question.setdefault(row["question"], []).append(row["answer"])
        kinds = [("circle", "square", "cross")[kind] for kind, *_ in row["drawing"]]
        asked = row["question"].split()
        counted = kinds.count(asked[2][:-2]) if asked[0] == "how" else None
        assert counted is None or str(counted) == row["answer"]
    best = sum(max(map(answers.count, answers)) for answers in by_question.values()) / len(rows)
    assert 0.27 < best < 0.34


def test_template_of_text_reads_parts_of_text(reader: Tokenizer) -> None:
    plain = reader.templated(CHATML, "chatml")
    said = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert plain.render(said) == plain.render([{"role": "user", "content": "ab"}])


def test_pool_of_workers_brings_pictures_home() -> None:
    with EnvPool(looking, 1, 10.0, 4.0) as pool:
        pool.ready()
        pool.start(0, TASKS[3])
        [(_, turn)] = pool.poll(None)
        assert isinstance(turn, Turn) and turn.messages is not None
        name = turn.messages[0]["content"][1]["image"]
        image = Image.open(io.BytesIO(PICTURES.read(name.removeprefix("sha256:"))))
        assert image.size == (16, 16) and image.getpixel((3, 3)) == (75, 75, 75)
        pool.drop(0)


@pytest.mark.parametrize("train_vision", [False, True])
def test_adapters_of_a_model_that_sees_leave_its_tower_alone_unless_that_is_asked_for(
    train_vision: bool, tmp_path: Path, folders: Callable[[str], Path]
) -> None:
    rows = [{"id": str(n), "messages": [message((drawn(n),), "?")]} for n in range(4)]
    run = posttrain.rl(
        rows, lambda task, reply: float("1" in reply), str(folders("smolvlm")), steps=2, prompts=2, group=4, max_tokens=4,
        lora=2, kl=0.01, train_vision=train_vision, env_workers=0, out=str(tmp_path), **HOW,
    )  # fmt: skip
    names = set(load_file(run.path / "checkpoints/step-000002/adapter_model.safetensors"))
    assert any("text_model" in name for name in names)
    assert any("vision_model" in name for name in names) == train_vision
    assert load_model(run.path / "checkpoints/step-000002").vision.processor.files  # type: ignore[attr-defined]


def test_an_adapter_of_a_model_that_sees_still_sees_when_it_goes_on_and_is_opened_and_merged(
    tmp_path: Path, folders: Callable[[str], Path]
) -> None:
    rows = [{"messages": [message("what?", (drawn(n),)), {"role": "assistant", "content": str(n)}]} for n in range(4)]
    how = dict(model=str(folders("qwen2_5_vl")), lora=2, rows=2, save_every=1, out=str(tmp_path / "run"), **HOW)
    run = posttrain.sft(rows, steps=2, **how)  # type: ignore[arg-type]
    last = run.path / "checkpoints/step-000002"
    whole = (last / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(last)
    posttrain.sft(rows, steps=2, resume=True, **how)  # type: ignore[arg-type]
    assert (last / "adapter_model.safetensors").read_bytes() == whole
    (last / "tokenizer.json").unlink()  # as PEFT would leave it
    asked = [{"id": "0", "messages": [message("what?", (drawn(0),))]}]
    found = posttrain.evaluate(asked, lambda task, reply: 1.0, str(last), samples=1, max_tokens=2, threads=1)
    assert all(t.media for r in found.rollouts for t in r.transcripts)
    merge_adapter(str(last), tmp_path / "merged")
    assert Tokenizer.load(tmp_path / "merged").pictures is not None
    assert (tmp_path / "merged/preprocessor_config.json").exists()


def test_engines_of_other_processes_are_not_shown_pictures(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    rows = [{"id": str(n), "messages": [message((drawn(n),), "?")]} for n in range(2)]
    with pytest.raises(UserError, match="reads pictures: use --engine vllm, or leave out --"):
        posttrain.rl(
            rows, lambda task, reply: 0.0, str(folders("qwen2_5_vl")), steps=1, prompts=2, group=2, max_tokens=3,
            replicas=1, env_workers=0, out=str(tmp_path), **HOW,
        )  # fmt: skip
