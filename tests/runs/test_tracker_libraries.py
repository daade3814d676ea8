"""Each tracker with its real library, without a network: what arrives there is the record of the run, also resumed."""

from __future__ import annotations

import json
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.resolve import as_dict
from posttrain.config.training import RL
from posttrain.core.rollouts import Outcome, Rollout
from posttrain.runs.run_record import RunRecord
from posttrain.runs.tracking.follower import read_state
from posttrain.runs.tracking.prometheus import PrometheusTracker
from posttrain.runs.tracking.trackers import Trackers

pytestmark = pytest.mark.timeout(600)
VALUES = {step: {"reward": step / 8, "pass@8": step / 4} for step in range(1, 6)}
FINDING = (2, "signal", "there is nothing to learn from")
SECONDS = 250.0  # that a library may take to start on a busy machine


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RL:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return RL(tasks="rows.jsonl", lr=0.25, out=str(tmp_path / "sweep" / "a"), save_every=2, track_project="sums")


def record(record: RunRecord, *steps: int) -> None:
    for step in steps:
        record.rollouts(step, [Outcome(Rollout({"prompt": "1+1="}, "g", [], 0.5, text="2", prompt="1+1="))])
        record.metrics(step, VALUES[step])
        record.timing(step, {"seconds/update": 0.5})
        record.health([FINDING] if step == FINDING[0] else [])
    record.close({})


def tracked(config: RL, name: str) -> str:
    """Let a tracker follow the record to the end; return the id of its run."""
    said: list[str] = []
    Trackers(RL(**{**as_dict_of(config), "track": (name,)}), Path(config.out), said.append).finish("finished", SECONDS)
    assert not [text for text in said if "waiting for" not in text], said
    found: str = read_state(Path(config.out), name)["id"]
    return found


def as_dict_of(config: RL) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.given}


def followed(config: RL, name: str) -> str:
    """Record and track steps 1 to 3, go on from a checkpoint of step 2, and end with step 5."""
    record(RunRecord.create(config.out, as_dict(config), "rl", {"objective": ["J"]}), 1, 2, 3)
    first = tracked(config, name)
    record(RunRecord.resume(config.out, 2), 3, 4, 5)
    assert tracked(config, name) == first
    return first


def log_records(path: Path) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, behind a header of seven bytes."""
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole, place = whole + data[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield whole
            whole = b""


def test_wandb_offline_holds_the_run(config: RL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    name = followed(config, "wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    records = [Record.FromString(raw) for file in files for raw in log_records(file)]
    kinds = [record.WhichOneof("record_type") for record in records]
    runs = [record.run for record in records if record.HasField("run")]
    named = [(r.run_id, r.project, r.run_group, r.display_name, r.job_type) for r in runs]
    assert named == [(name, "sums", "sweep", "a", "rl")] * 2
    options = {update.key: update.value_json for update in runs[0].config.update}
    assert options["lr"] == "0.25" and json.loads(options["run"])["objective"] == ["J"]
    rows = [{item.key or "/".join(item.nested_key): item.value_json for item in record.history.item} for record in records
            if record.HasField("history")]  # fmt: skip
    assert [(int(r["_step"]), float(r["reward"]), float(r["pass@8"]), float(r["seconds/update"])) for r in rows] == [
        (step, values["reward"], values["pass@8"], 0.5) for step, values in VALUES.items()
    ]
    assert [int(r["_step"]) for r in rows if any(key.startswith("samples") for key in r)] == [2, 3, 4, 5]
    [alert] = [record.alert for record in records if record.HasField("alert")]
    assert (alert.title, alert.text) == ("step 2: signal", FINDING[2]) and kinds.count("exit") == 2


def test_trackio_holds_the_run(config: RL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when the library is imported
    trackio = pytest.importorskip("trackio")
    name = followed(config, "trackio")
    from trackio.sqlite_storage import SQLiteStorage  # its Api shows no curves and no traces; its command reads these

    [run] = trackio.Api().runs("sums")
    assert run.name == name and name.startswith("a-") and run.config["lr"] == 0.25
    curves = [
        (row["step"], row["reward"], row["pass@8"]) for row in SQLiteStorage.get_logs("sums", name) if "reward" in row
    ]
    assert curves == [(step, values["reward"], values["pass@8"]) for step, values in VALUES.items()]
    traces = SQLiteStorage.get_traces("sums", name, sort="step_asc")
    assert [(trace["key"], trace["step"]) for trace in traces] == [("samples", step) for step in (2, 3, 4, 5)]
    said = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert all((trace["messages"], trace["metadata"]) == (said, {"reward": 0.5}) for trace in traces)
    assert [(alert["title"], alert["text"]) for alert in run.alerts()] == [("step 2: signal", FINDING[2])]


def test_mlflow_holds_the_run(config: RL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.MlflowClient().search_experiments()  # which makes the tables: minutes on a busy machine
    name = followed(config, "mlflow")
    client = mlflow.MlflowClient()
    run = client.get_run(name)
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    assert client.get_experiment(run.info.experiment_id).name == "sums"
    assert run.data.params["lr"] == "0.25" and run.data.params["run.objective"] == '["J"]'
    for metric, written in {"reward": "reward", "pass@8": "pass_8"}.items():
        history = sorted((point.step, point.value) for point in client.get_metric_history(name, written))
        assert history == [(step, values[metric]) for step, values in VALUES.items()]
    assert (run.data.tags["group"], run.data.tags["finding.2.signal"]) == ("sweep", FINDING[2])
    samples = [file.path for file in client.list_artifacts(name, "samples")]
    assert samples == [f"samples/step-00000{step}.json" for step in (2, 3, 4, 5)]


def test_swanlab_offline_holds_the_run(config: RL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    name = followed(config, "swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    files = sorted((tmp_path / "swanlog").glob("run-*/*.swanlab"))
    records = [Record.FromString(raw) for file in files for raw in log_records(file)]
    begun = [record.start for record in records if record.HasField("start")]
    assert [(s.id, s.project, s.name, s.group, s.job_type) for s in begun] == [(name, "sums", "a", "sweep", "rl")] * 2
    scalars = [record.scalar for record in records if record.HasField("scalar")]
    for metric in ("reward", "pass@8"):
        shown = [(point.step, point.value.number) for point in scalars if point.key == metric]
        assert shown == [(step, values[metric]) for step, values in VALUES.items()]
    texts = [record.media for record in records if record.HasField("media")]
    assert [text.step for text in texts if text.key == "samples"] == [2, 3, 4, 5]
    [found] = [text for text in texts if text.key == "finding/signal"]
    [file] = (tmp_path / "swanlog").rglob(found.value.items[0].filename)
    assert found.step == 2 and file.read_text() == FINDING[2]
    assert all("lr:" in file.read_text() for file in (tmp_path / "swanlog").rglob("config.yaml"))


def test_prometheus_keeps_a_metric_that_the_next_step_lacks() -> None:
    tracker = PrometheusTracker()
    tracker.labels, tracker.options, tracker.values, tracker.findings = {"run": "a"}, {}, {}, {}
    tracker.log(1, {"eval/accuracy": 0.5, "reward": 0.1})
    tracker.log(2, {"reward": 0.2})
    lines = tracker.page().splitlines()
    assert {'posttrain_eval_accuracy{run="a"} 0.5', 'posttrain_reward{run="a"} 0.2', 'posttrain_step{run="a"} 2.0'} <= {
        *lines
    }


def test_prometheus_serves_the_last_step_over_http(config: RL) -> None:
    record(RunRecord.create(config.out, as_dict(config), "rl", {}), 1, 2, 3)
    said: list[str] = []
    given = {**as_dict_of(config), "track": ("prometheus:0",)}
    trackers = Trackers(RL(**given), Path(config.out), said.append)
    while not said or read_state(Path(config.out), "prometheus:0").get("step") != 3:
        time.sleep(0.02)
        trackers.look()
    address = said[0].removeprefix("prometheus:0: ")
    assert address.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(address) as answer:
        kind, page = answer.headers["Content-Type"], answer.read().decode()
    labels = 'run="a",group="sweep",verb="rl"'
    assert kind.startswith("text/plain; version=0.0.4")
    lines = page.splitlines()
    assert "# TYPE posttrain_reward gauge" in lines and f"posttrain_reward{{{labels}}} 0.375" in lines
    assert f"posttrain_pass_8{{{labels}}} 0.75" in lines and f"posttrain_step{{{labels}}} 3.0" in lines
    assert f'posttrain_findings_total{{{labels},name="signal"}} 1' in lines
    assert f'posttrain_option{{{labels},name="lr",value="0.25"}} 1' in lines
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(address.replace("/metrics", "/"))
    with pytest.raises(urllib.error.HTTPError, match="421"):  # a name that a web page has bound to this machine
        urllib.request.urlopen(urllib.request.Request(address, headers={"Host": "elsewhere.example"}))
    trackers.finish("finished", SECONDS)
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(page)}
    [sample] = families["posttrain_reward"].samples
    assert (sample.value, sample.labels["group"]) == (0.375, "sweep")


def test_a_finding_and_the_options_are_texts_in_tensorboard(config: RL, tmp_path: Path) -> None:
    record(RunRecord.create(config.out, as_dict(config), "rl", {}), 1, 2, 3)
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(config.out) / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(s, VALUES[s]["reward"]) for s in (1, 2, 3)]
    [found] = events.Tensors("findings/signal/text_summary")
    assert found.step == 2 and found.tensor_proto.string_val[0].decode() == FINDING[2]
    [options] = events.Tensors("configuration/text_summary")
    assert '"lr": 0.25' in options.tensor_proto.string_val[0].decode()
