"""The folder of a run, from the first check to the open record.

Decides whether a run may begin or continue in a folder, from which checkpoint it continues, and what is deleted when it
overwrites. A run that ended before its first step is in nobody's way. `RunFolder.open` is the first to write, so an error
in options, data or model costs nothing. An overwritten run is set aside there, and deleted when the new run has written
its first step; if that never happens, it is put back: by `close`, or after a crash by the next command that begins or
resumes a run in the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self

from posttrain.config.held_out_sets import held_out_sets
from posttrain.config.resolve import AnyTraining, as_dict, continued, own_judge
from posttrain.config.service_options import SERVICES, ScorerOption, named_services
from posttrain.config.suite_file import read_suite
from posttrain.config.training import RL, Training
from posttrain.core import run_date, user_files
from posttrain.core.messages import dashed
from posttrain.core.pictures import PICTURES
from posttrain.core.protocols import Alone, Lasting, World
from posttrain.core.types import UserError
from posttrain.models.checkpoint_location import pinned
from posttrain.runs import checkpoint as checkpoints
from posttrain.runs import fingerprint, run_files
from posttrain.runs.chat_choice import CHAT, Chatting
from posttrain.runs.fingerprint import Print
from posttrain.runs.lock import Lock
from posttrain.runs.run_files import (
    ASIDE,
    CHECKPOINTS,
    RUN,
    delete_aside,
    delete_run,
    holds_run,
    made_by_run,
    put_back,
    set_aside,
    writing,
)
from posttrain.runs.run_reading import missing_steps, read_metrics, read_run
from posttrain.runs.run_record import RunRecord, Unwritten
from posttrain.runs.terminal.notices import tell, warn

READ = (
    "tasks",
    "mixture",
    "eval_tasks",
    "eval_suite",
    "forget",
    "ptx",
    "model",
    "critic_model",
    "teacher",
    "teachers",
    "tokenizer",
    "chat_template",
    "algorithm",
    *SERVICES,
)
"""Options that may name files. A run whose content of one of these, or code of `env` or `optimizer`, changes is another."""


class RunFolder(Generic[AnyTraining]):
    """A run's folder, locked against other processes within the `with` statement: `with RunFolder(config) as run`."""

    def __init__(
        self,
        config: AnyTraining,
        rows: Any = None,
        env: Callable[..., Any] | None = None,
        world: World | None = None,
    ) -> None:
        """Check and lock the folder for a run with these options; it is still unchanged.

        `rows` and `env`: tasks and environment given as objects; `world`: the processes that share the run, of which
        the first checks, locks and writes. Raises UserError if --out holds a run and none is expected, or the reverse;
        if another process is writing it; if a run cannot continue unchanged.
        """
        self.path = Path(config.out)
        self.world = world or Alone()
        self.config: AnyTraining = config
        self.checkpoint: Path | None = None  # the checkpoint from which the run continues
        self.chat = Chatting()  # the form in which the model is shown plain prompts
        self._rows, self._env = rows, env
        self._noted: dict[str, Any] = {}  # entries of run.json about this resume
        self._lock: Lock | None = None
        self._stepped = False  # whether the folder holds a step of this run
        self._record: RunRecord | None = None
        self._dated = ExitStack()
        if self.world.rank == 0:
            self._look(self._again(config))
        # The first process decides: it may already be writing the folder when the others look at it.
        found = (self.config, self.checkpoint) if self.world.rank == 0 else None
        self.config, self.checkpoint = self.world.gather(found)[0]

    def _again(self, config: AnyTraining) -> AnyTraining:
        """Return the options for a restart by torchrun: continue from a checkpoint, or begin again.

        It applies only if an earlier attempt has begun the run. A folder that it refused is refused again.
        """
        if not isinstance(self.world, Lasting) or not self.world.marked(self._begun_here):
            return config
        # checkpoints may be those of an overwritten run, which was put back
        saved = self.world.marked(self._stepped_here) and any((self.path / CHECKPOINTS).glob("step-*"))
        tell(f"started again {'from the newest checkpoint' if saved else 'from the beginning'}")
        given = {name: getattr(config, name) for name in config.given}
        return type(config)(**{**given, "resume": saved, "overwrite": not saved})

    @property
    def _begun_here(self) -> str:
        """Return the mark for later attempts, which is set once this one may write the folder."""
        return f"begun {self.path.absolute()}"

    @property
    def _stepped_here(self) -> str:
        """Return the mark for later attempts, which is set once the folder holds a step of this run."""
        return f"stepped {self.path.absolute()}"

    def _look(self, config: AnyTraining) -> None:
        """Examine the folder, and decide how to use it."""
        if config.resume and config.overwrite:
            raise UserError("--resume continues the run in --out and --overwrite deletes it: give one of them")
        try:
            taken = self.path.exists() and not self.path.is_dir()
        except (OSError, ValueError) as error:  # a name that the file system does not accept
            raise UserError(
                f"--out {str(self.path)[:60]!r} cannot be a folder: {getattr(error, 'strerror', error)}"
            ) from None
        if taken:
            raise UserError(f"{self.path} is a file: pass a folder as --out")
        try:
            if self.path.is_dir():
                self._lock = Lock(self.path)
                self._settle()
            self.config = self._continued(config) if config.resume else self._begun(config)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        try:
            PICTURES.begin(self.path / run_files.PICTURES)
            self._dated.enter_context(run_date.fixed(self.day))  # may download the model
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @cached_property
    def day(self) -> str:
        """The day that chat templates use throughout the run, in all of its processes."""
        found = None
        if self.world.rank == 0:
            found = read_run(self.path).get("day") if self.config.resume else day_of(self.start)
        day: str = self.world.gather(found or run_date.today())[0]
        return day

    def close(self) -> None:
        """Release the folder for other processes, without a run that wrote no step if it was to replace another one.

        May be called twice.
        """
        PICTURES.end()
        self._dated.close()
        if self._lock is not None:
            lock, self._lock = self._lock, None
            try:
                self._settle()
            finally:
                lock.release()

    def _settle(self) -> None:
        """End the replacement of a run: put it back, or delete it if the new one has written a step."""
        with writing(self.path):
            if (self.path / ASIDE).is_dir() and any(row["step"] for row in read_metrics(self.path)):
                delete_aside(self.path)
            elif put_back(self.path):
                tell(f"{self.path} holds the earlier run again, as the one that was to replace it wrote no step")

    def stepped(self) -> None:
        """Note that the record holds a step of this run, and delete the run that it replaces."""
        if self._stepped or self.world.rank:
            return
        self._stepped = True
        if isinstance(self.world, Lasting):
            self.world.mark(self._stepped_here)
        if self._record is not None and (self.path / ASIDE).is_dir():
            self._record.flush()
            delete_aside(self.path)

    @cached_property
    def start(self) -> Path | None:
        """The checkpoint with which the run began (None: from scratch). Its name may have another meaning by now."""
        if self.config.resume:
            recorded = read_run(self.path).get("initial")
            if not isinstance(recorded, str | None) or (isinstance(self.config, RL) and not recorded):
                raise UserError(f"{self.path / RUN} is damaged (no valid 'initial'): put a copy of it back")
            return Path(recorded) if recorded else None
        return pinned(checkpoints.resolve(self.config.model)) if self.config.model else None

    def open(self, told: Mapping[str, Any]) -> RunRecord:
        """Return the record, ready for writing: new, or without the steps after the checkpoint.

        `told`: further entries of run.json.
        """
        if self.world.rank:
            return Unwritten()
        initial = str(self.start) if self.start else None
        told = {"initial": initial, "day": self.day, CHAT: self.chat.recorded(), **told, "inputs": self._inputs}
        options = as_dict(self.config)
        if isinstance(self.world, Lasting):
            self.world.mark(self._begun_here)
        with writing(self.path):
            if self.checkpoint is not None:
                self.stepped()
                checkpoints.delete_drafts(self.path)
                step = checkpoints.step_of(self.checkpoint)
                return RunRecord.resume(self.path, step, options, told, self._noted)
            if self._lock is None:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = Lock(self.path)
            if _without_step(self.path):
                delete_run(self.path)
            elif self.config.overwrite:
                set_aside(self.path)
            self._record = RunRecord.create(self.path, options, self.config.verb, told)
            return self._record

    def _begun(self, config: AnyTraining) -> AnyTraining:
        if holds_run(self.path) and not config.overwrite and not _without_step(self.path):
            way = "--resume continues it, --overwrite deletes it, or choose another --out"
            raise UserError(f"{self.path} already holds a run: {way}")
        if config.overwrite:
            _keep_inputs(config, self.path)
        return config

    def _continued(self, config: AnyTraining) -> AnyTraining:
        """Return the options of the run, after checking that it can continue unchanged."""
        run, chosen = resumed(config)
        self.checkpoint = self._newest(chosen)
        lost = missing_steps(self.path, checkpoints.step_of(self.checkpoint))
        if lost and not config.accept_changes:
            raise UserError(
                f"cannot resume {self.path}, whose record is incomplete: {', '.join(lost)}; put a copy of it back, or "
                "continue without it with --accept-changes"
            )
        self.config = chosen
        before = run.get("inputs", {})
        other = fingerprint.changed(before, self._inputs)
        refused = dict.fromkeys(map(self._named, other))  # a file may be read for several parts of a suite
        if refused and not config.accept_changes:
            raise UserError(
                f"cannot resume {self.path}: {', '.join(refused)} changed since the run began; restore them, start a new "
                "run in another --out, or continue with the changes with --accept-changes"
            )
        for name in refused:
            warn(f"{name} changed since the run began: the run continues with the change, and {RUN} notes it")
        for name in dict.fromkeys(map(self._named, fingerprint.rewritten(before, self._inputs))):
            tell(f"{name} was rewritten since the run began, with the same size and samples")
        self._noted = {
            **({"changed": {name: before[name] for name in other}} if other else {}),
            **({"lost": lost} if lost else {}),
        }
        return chosen

    def _newest(self, config: Training) -> Path:
        """Return the newest undamaged checkpoint; report skipped ones."""
        passed: list[tuple[Path, str]] = []
        for folder, damage in checkpoints.examined(self.path):
            if damage is None:
                for other, why in passed:
                    warn(f"checkpoint {other} is damaged ({why}): using the one before it")
                return folder
            passed.append((folder, damage))
        over = "to start over, give --overwrite instead of --resume"
        if passed:
            damages = ", ".join(f"{folder.name}: {why}" for folder, why in passed[:3])
            raise UserError(
                f"cannot resume {self.path}: no undamaged checkpoint is left ({damages}); put a copy of one back, or, {over}"
            )
        raise UserError(
            f"cannot resume {self.path}: it ended before its first checkpoint (--save-every {config.save_every}), so there "
            f"is nothing to continue; {over}"
        )

    @cached_property
    def _inputs(self) -> dict[str, Print | None]:
        """Return fingerprints of the run's inputs, by option. A dataset given by name has none."""
        found: dict[str, Print | None] = {}
        for name in READ:
            for label, value in _paths(self.config, name):
                value = str(self.start) if name == "model" and self.start else value
                found[label] = fingerprint.of_path(Path(value)) or fingerprint.of_code(value)
        if self._rows is not None:
            rows = self._rows
            found["tasks"] = fingerprint.of_rows(rows) if isinstance(rows, Sequence) else fingerprint.of_code(rows)
        if env := self._env or self.config.env:
            found["env"] = fingerprint.of_code(env)
        found["optimizer"] = fingerprint.of_code(self.config.optimizer)
        return {name: value for name, value in found.items() if value is not None}

    def _named(self, option: str) -> str:
        """Return the option with its value, for messages."""
        kind = option.partition(" ")[0]
        files = dict(_paths(self.config, kind))
        value = self.start if option == "model" else files.get(option) or getattr(self.config, kind)
        return f"{dashed(kind)} {value}"


def resumed(config: AnyTraining) -> tuple[dict[str, Any], AnyTraining]:
    """Return run.json of the run that `config` resumes, and the options with which the run continues.

    Raises UserError if there is none, if another verb made it, or if it cannot continue with other options.
    """
    folder = Path(config.out)
    if not (folder / RUN).exists():
        raise UserError(f"{folder} holds no run to resume: leave out --resume, or give the --out of one")
    run = read_run(folder)
    if run["verb"] != config.verb:
        raise UserError(f"{folder} is a run of posttrain {run['verb']}: resume it with that verb")
    return run, continued(config, run["config"])


def _without_step(folder: Path) -> bool:
    """Return whether a folder holds a run that ended before its first step, which another may replace."""
    if not (folder / RUN).is_file() or any((folder / CHECKPOINTS).glob("*")):
        return False
    return not any(row["step"] for row in read_metrics(folder))


def day_of(checkpoint: Path | None) -> str | None:
    """Return the day with which a run trained a checkpoint; None if it has none."""
    from posttrain.models.tokenizer.tokenizer_files import read_special

    if checkpoint is None or not os.path.isdir(checkpoint):  # the loader reports a name that is too long
        return None
    return read_special(checkpoint / "tokenizer_config.json").get(run_date.CONFIG_KEY)


def _keep_inputs(config: Training, folder: Path) -> None:
    """Raise UserError if an input of the run would be overwritten, under whatever name."""
    if not folder.is_dir():
        return
    deleted = [user_files.real(path) for path in made_by_run(folder)]
    for _, value in (labelled for name in READ for labelled in _paths(config, name)):
        needed = checkpoints.listed(Path(value)) if os.path.exists(Path(value) / RUN) else [Path(value)]
        if any(user_files.real(path).is_relative_to(gone) for path in needed for gone in deleted):
            raise UserError(f"--overwrite would delete {value}, which this run needs: choose another --out")


def _paths(config: Training, name: str) -> list[tuple[str, str]]:
    """Return (label, value) of the files of an option of `READ`: one, or one per service or entry."""
    if name == "mixture":
        mixture = getattr(config, name, {})
        named = [(f"mixture {part} {key}", own.get(key)) for part, own in mixture.items() for key in ("tasks", "env")]
        return [(label, value) for label, value in named if value]
    value = getattr(config, name, None)
    if name == "eval_suite" and value:
        parts = read_suite(value, {"model": config.model or config.out}, "--eval-suite")
        named = [(f"{name} {part.name} {key}", getattr(part.config, key)) for part in parts for key in ("tasks", "env")]
        named += [(f"{name} {part.name} scorer", ScorerOption(part.config.scorer).place) for part in parts]
        return [(name, value), *((label, path) for label, path in named if path)]
    if name == "eval_tasks":
        return [(f"{name} {entry}".rstrip(), path) for entry, path in held_out_sets(value or ()).items()]
    if name in SERVICES:
        named = named_services(value or (), name.replace("_", "-"))
        judges = [(f"{name} {service}", own_judge(path)) for service, path in named if name == "judge"]
        paths = [(f"{name} {service}", path) for service, path in named]
        return [*paths, *((f"{label}'s model", model) for label, model in judges if model)]
    if isinstance(value, dict):
        return [(f"{name} {entry}", path) for entry, path in value.items()]
    return [(name, value)] if isinstance(value, str) and value else []
