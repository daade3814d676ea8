"""The run directory: complete, readable with plain JSON, byte-identical after a resume, never half-written."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from posttrain.cli import inspect_commands
from posttrain.core.rollouts import Outcome, PlayedTurn, Rollout
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Completion, Invalid, StopReason, UserError
from posttrain.runs.curves import curves
from posttrain.runs.record.rollout_reading import EVERY, plainly, read_rollouts, timed_rollouts
from posttrain.runs.record.rollout_rows import transcripts_of
from posttrain.runs.run_files import delete_run, holds_run, writing
from posttrain.runs.run_reading import read_metrics, read_run, read_timing, rollout_steps
from posttrain.runs.run_record import RunRecord

CONFIG = {"seed": 7, "lr": 1e-4, "out": Path("runs/a"), "clip_high": math.inf, "stop": ("</answer>",)}


def transcript(seed: int = 0) -> Transcript:
    """Prompt of 3, reply of 2, tool result of 2, reply of 3."""
    logp = np.log(np.random.default_rng(seed).random(5)).astype(np.float32).tolist()
    result = Transcript()
    result.observe([5, 6, 7])
    result.sample(Completion(0, [8, 9], logp[:2], "ab", StopReason.STOP, 3))
    result.observe([1, 1])
    result.sample(Completion(0, [4, 4, 2], logp[2:], "cd", StopReason.EOS, 3))
    return result


def rollout(seed: int = 0, reward: float | Invalid = 1.1) -> Rollout:
    task = {"id": "multiarith-1", "prompt": "Quanto fa 6 per 7?", "answer": "42"}
    parts = {"correct": 1.0, "form": 0.1}
    return Rollout(task, "multiarith-1", [transcript(seed)], reward, parts, [(2, 0.5)], text="a\nb\u2028c", prompt="Q")


def values(step: int) -> dict[str, float]:
    return {"reward": math.sin(step), "length": 10 / 3 * step, "kl": math.nan if step == 3 else 0.0}


def play(record: RunRecord, steps: range) -> None:
    for step in steps:
        record.rollouts(step, [Outcome(rollout(step), 0.25 * step)])
        record.metrics(step, values(step))
        record.timing(step, {"tokens_per_second/sampled": 100.0 * step})


def content(folder: Path) -> dict[str, bytes]:
    names = ("metrics.jsonl", "timing.jsonl", "rollouts/*.parquet")
    return {str(path.relative_to(folder)): path.read_bytes() for name in names for path in folder.glob(name)}


def events(folder: Path) -> dict[tuple[str, int], float]:
    """(tag, step) -> value as TensorBoard shows it: a session that starts at a step hides what older files say."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown: dict[tuple[str, int], float] = {}
    for path in sorted(folder.glob("tensorboard/*tfevents*"), key=lambda path: int(path.suffix[1:])):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            if event.session_log.status == SessionLog.START:
                shown = {key: value for key, value in shown.items() if key[1] < event.step}
            shown |= {
                (value.tag, event.step): value.simple_value
                for value in event.summary.value
                if not value.tag.endswith("/text_summary")
            }
    return shown


def test_run_json_says_what_ran_with_what_and_where(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "a", CONFIG, "rl", {"objective": ["mean over tokens"]})
    run = read_run(tmp_path / "a")
    assert (run["verb"], run["seed"], run["objective"]) == ("rl", 7, ["mean over tokens"])
    assert run["config"] == {"seed": 7, "lr": 1e-4, "out": "runs/a", "clip_high": "inf", "stop": ["</answer>"]}
    assert run["versions"]["python"] == sys.version.split()[0] and run["versions"]["torch"]
    assert run["machine"]["cores"] >= 1 and run["machine"]["memory_gib"] > 0 and "end" not in run
    record.close({"eval/accuracy": np.float32(0.5)})
    assert read_run(tmp_path / "a")["final"] == {"eval/accuracy": 0.5}
    assert read_run(tmp_path / "a")["end"] >= run["start"]
    assert not list(tmp_path.glob("**/*.tmp"))


def test_git_revision_is_noted_and_edits_make_it_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunRecord.create("outside", {}, "rl", {}).close({})
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "code.py").write_text("1")
    for command in (["init", "-q"], ["add", "code.py"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    RunRecord.create("clean", {}, "rl", {}).close({})
    (tmp_path / "code.py").write_text("2")
    RunRecord.create("edited", {}, "rl", {}).close({})
    assert read_run("outside")["git"] is None
    assert read_run("clean")["git"]["dirty"] is False and len(read_run("clean")["git"]["revision"]) == 40
    assert read_run("edited")["git"] == {**read_run("clean")["git"], "dirty": True}


def test_the_seconds_of_turns_stand_beside_the_rollouts_and_come_back_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(seconds: float) -> Rollout:
        found = rollout()
        found.turns = [
            PlayedTurn(SpanKind.PROMPT, "Q", 0, 0, 3, seconds=0.01),
            PlayedTurn(SpanKind.SAMPLED, "a", 0, 3, 2, seconds=seconds),
        ]
        return found

    record = RunRecord.create(tmp_path, CONFIG, "rl", {})
    record.rollouts(1, [Outcome(timed(1.26)), Outcome(timed(0.5))])
    record.rollouts(2, [Outcome(timed(1.5))])
    record.close({})
    times = [[turn["seconds"] for turn in row["turns"]] for row in timed_rollouts(tmp_path, 1)]
    assert times == [[0.01, 1.26], [0.01, 0.5]]
    assert inspect_commands.rollouts(str(tmp_path), step=1) == 0
    assert "a  (took 1.3 s)\n" in (said := capsys.readouterr().out) and "a  (took 0.5 s)\n" in said and "Q\n" in said
    assert inspect_commands.rollouts(str(tmp_path), step=1, json=True) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    assert (
        shown == [plainly(row) for row in read_rollouts(tmp_path, 1, EVERY)] and "seconds" not in shown[0]["turns"][0]
    )
    RunRecord.resume(tmp_path, 1).close({})
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/step-*")) == [
        "rollouts/step-000001.parquet",
        "seconds/step-000001.parquet",
    ]
    (tmp_path / "seconds/step-000001.parquet").unlink()
    assert all("seconds" not in turn for row in timed_rollouts(tmp_path, 1) for turn in row["turns"])


def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    RunRecord.create(tmp_path, CONFIG, "rl", {}).close({})
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(UserError, match=r"--resume .* --out"):
        RunRecord.create(tmp_path, {}, "sft", {})
    assert (tmp_path / "run.json").read_bytes() == before
    with pytest.raises(UserError, match="holds no run"):
        RunRecord.resume(tmp_path / "elsewhere", 3)


def test_metrics_are_one_sorted_line_a_step_of_strict_json(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, CONFIG, "rl", {})
    record.metrics(1, {"reward": np.float32(0.5), "kl": -math.inf, "entropy": 1e-7})  # type: ignore[dict-item]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":1,"entropy":1e-07,"kl":null,"reward":0.5}\n'
    record.metrics(2, {"reward": 0.1 + 0.2})
    assert read_metrics(tmp_path)[1]["reward"] == 0.1 + 0.2  # every bit
    with pytest.raises(AssertionError, match="one line a step"):
        record.metrics(2, {"reward": 0.0})


def test_a_resumed_run_is_byte_identical_to_an_uninterrupted_one(tmp_path: Path) -> None:
    straight = RunRecord.create(tmp_path / "straight", CONFIG, "rl", {})
    play(straight, range(1, 8))
    straight.close({})

    killed = RunRecord.create(tmp_path / "killed", CONFIG, "rl", {})
    play(killed, range(1, 6))
    with (tmp_path / "killed" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":6,"rew')  # killed while it wrote
    (tmp_path / "killed" / "rollouts" / "step-000006.parquet.tmp").write_text("{")
    killed.flush()

    resumed = RunRecord.resume(tmp_path / "killed", 4)
    assert rollout_steps(tmp_path / "killed") == [1, 2, 3, 4]
    assert not list((tmp_path / "killed").glob("*/*.tmp")), "what was not whole is of no use"
    play(resumed, range(5, 8))
    resumed.close({})
    assert content(tmp_path / "killed") == content(tmp_path / "straight")
    assert len(content(tmp_path / "straight")) == 2 + 7
    assert [resume["step"] for resume in read_run(tmp_path / "killed")["resumes"]] == [4]


def test_a_half_written_last_line_is_cut_even_if_its_step_would_be_kept(tmp_path: Path) -> None:
    RunRecord.create(tmp_path, CONFIG, "rl", {}).close({})
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"reward":1.0}\n{"step":2,"rew')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    RunRecord.resume(tmp_path, 2).metrics(2, {"reward": 0.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_a_torn_file_of_rollouts_is_told_for_it_appears_as_a_whole(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, CONFIG, "rl", {})
    assert not (tmp_path / "rollouts").exists(), "a run that samples nothing has none"
    record.rollouts(1, [Outcome(rollout(1))] * 2)
    record.flush()
    file = tmp_path / "rollouts" / "step-000001.parquet"
    assert len(read_rollouts(tmp_path, 1)) == 2
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"step-000001.parquet is damaged \(.*\): put a copy of it back"):
        read_rollouts(tmp_path, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, CONFIG, "rl", {})
    record._metrics._file = Path("/dev/full").open("ab")  # noqa: SIM115
    with pytest.raises(UserError, match=r"cannot write to .*metrics\.jsonl: No space left"), writing(tmp_path):
        record.metrics(1, {"reward": 0.0})


def test_resuming_reopens_a_finished_run(tmp_path: Path) -> None:
    RunRecord.create(tmp_path, CONFIG, "rl", {}).close({"reward": 1.0})
    RunRecord.resume(tmp_path, 0)
    assert not {"end", "final"} & read_run(tmp_path).keys()


def test_tensorboard_shows_each_step_once_as_the_metrics_say(tmp_path: Path) -> None:
    first = RunRecord.create(tmp_path, CONFIG, "rl", {})
    play(first, range(1, 6))
    first.close({})
    second = RunRecord.resume(tmp_path, 3)
    second.metrics(4, {"reward": -1.0})
    second.close({})
    lines = read_metrics(tmp_path) + read_timing(tmp_path)
    recorded = {
        (name, line["step"]): value
        for line in lines
        for name, value in line.items()
        if name != "step" and value is not None
    }
    shown = events(tmp_path)
    assert shown.keys() == recorded.keys()
    assert all(shown[key] == pytest.approx(recorded[key], rel=1e-6) for key in recorded)


def test_rollouts_read_back_bit_for_bit(tmp_path: Path) -> None:
    played = [rollout(1), rollout(2, Invalid("verifier ran out of time"))]
    record = RunRecord.create(tmp_path, CONFIG, "rl", {})
    record.rollouts(12, [Outcome(played[0], -0.75), Outcome(played[1])])
    record.flush()
    assert (tmp_path / "rollouts" / "step-000012.parquet").exists()
    first, second = read_rollouts(tmp_path, 12)
    assert (first["id"], first["group"], first["columns"]["answer"]) == ("12/0", "multiarith-1", "42")
    assert (first["text"], first["prompt"], first["stop"], first["version"]) == ("a\nb\u2028c", "Q", "eos", 3)
    assert (first["reward"], first["parts"]) == (1.1, {"correct": 1.0, "form": 0.1})
    assert (first["step_rewards"], first["advantage"]) == ([{"at": 2, "reward": 0.5}], -0.75)
    assert first["invalid"] is None
    assert (second["reward"], second["invalid"]) == (None, "verifier ran out of time")
    for line, original in zip((first, second), played, strict=True):
        (read,), (written,) = transcripts_of(line), original.transcripts
        assert read.as_dict() == written.as_dict()
        assert np.array(line["engine"], np.float32).tobytes() == np.array(written.logp, np.float32).tobytes()


def test_spans_of_sampled_tokens_rebuild_the_mask(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, CONFIG, "rl", {})
    generator = np.random.default_rng(0)
    for step in range(1, 30):
        written, own = Transcript(), (generator.random(10) < 0.5).tolist()
        for token, sampled in enumerate(own):
            if sampled:
                written.sample(Completion(0, [token], [-1.0], "", StopReason.EOS, 0))
            else:
                written.observe([token])
        record.rollouts(step, [Outcome(Rollout({}, "g", [written], 0.0))])
        record.flush()
        mask = [False] * 10
        for span in read_rollouts(tmp_path, step)[0]["spans"]:
            mask[span["start"] : span["start"] + span["length"]] = [span["kind"] == "sampled"] * span["length"]
        assert mask == own


def test_any_text_is_kept_and_half_a_pair_as_its_escape(tmp_path: Path) -> None:
    odd = 'quote " line\nreturn\r separator\u2028 null\0 lone \ud83d emoji 🙂'
    record = RunRecord.create(tmp_path, CONFIG, "rl", {})
    record.rollouts(1, [Outcome(Rollout({"answer": {"low": math.nan}}, "g", [], 0.0, text=odd))])
    record.flush()
    (row,) = read_rollouts(tmp_path, 1)
    assert row["text"] == odd.replace("\ud83d", "\\ud83d") and row["columns"] == {"answer": {"low": None}}


def test_what_fails_while_a_table_is_written_is_raised_by_what_comes_next(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, CONFIG, "rl", {})
    (tmp_path / "rollouts").write_text("in the way")
    record.rollouts(1, [Outcome(rollout(1))])
    with pytest.raises(UserError, match=r"cannot write to .*rollouts"), writing(tmp_path):
        record.flush()


def test_missing_rollouts_are_answered_with_the_steps_there_are(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, CONFIG, "rl", {})
    play(record, range(2, 5))
    record.flush()
    with pytest.raises(UserError, match="2 to 4"):
        read_rollouts(tmp_path, 9)


def test_curves_draw_the_metrics_that_exist_for_one_run_and_for_several(tmp_path: Path) -> None:
    for name in ("one", "two"):
        record = RunRecord.create(tmp_path / name, CONFIG, "rl", {})
        play(record, range(1, 40))
        record.close({})
    assert curves(tmp_path / "one") == tmp_path / "one" / "curves.png"
    out = curves({"seed 1": tmp_path / "one", "seed 2": tmp_path / "two"}, tmp_path / "both.png")
    for path in (tmp_path / "one" / "curves.png", out):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    RunRecord.create(tmp_path / "empty", CONFIG, "sft", {}).close({})
    with pytest.raises(UserError, match="no metric"):
        curves(tmp_path / "empty")


def test_importing_the_record_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "matplotlib", "tensorboardX", "rich")
    modules = (
        "posttrain.runs.run_folder, posttrain.runs.checkpoint, posttrain.runs.terminal.display, "
        "posttrain.training.figures"
    )
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_weights_for_vllm_that_a_killed_run_left_are_deleted_with_the_run(tmp_path: Path) -> None:
    for name in ("weights-0-12", "adapter-1-3"):
        (tmp_path / "weight-sync" / name).mkdir(parents=True)
        (tmp_path / "weight-sync" / name / "model.safetensors").touch()
    assert holds_run(tmp_path)
    delete_run(tmp_path)
    assert not list(tmp_path.iterdir())
