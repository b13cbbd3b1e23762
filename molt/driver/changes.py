"""What a resumed attempt does otherwise than the attempt before it, whether steps come out bit for bit, and whether its checkpoint fits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molt import machine
from molt.agents.load import load_agent
from molt.config import Config
from molt.errors import DataError
from molt.learn.checkpoint import Position
from molt.learn.rank_actor import find_estimator
from molt.log.reader import LogReader
from molt.log.rows import Event, event
from molt.places import program_name

TRAINER_ROOMS = ("actor", "algo", "critic", "fsdp", "reference")
TRAINER_SETTINGS = ("data.max_len", "run.seed", "train.deterministic", "train.epochs_per_batch", "train.routing_replay")
"""With the rooms: what the numbers of a planned step depend on. How its batch is cut stands in the plan."""
NUMERIC_PACKAGES = ("numpy", "torch", "transformers", "nemo-automodel", "transformer-engine")
NUMERIC_VARIABLES = ("OMP_NUM_THREADS", "TRITON_F32_DEFAULT", "CUBLAS_WORKSPACE_CONFIG")
"""With code, processor, cores and GPUs: what they depend on beside settings."""


def provenance(config: Config, pipeline: str | None = None) -> dict[str, Any]:
    """What a run under those settings is made of, by the columns of attempt_started: code, agent, pipeline, packages, hardware.

    pipeline: its file.
    """
    further = {Path(file).resolve() for file in (pipeline, find_estimator(config)) if file is not None}
    return {
        "code_digest": machine.code_digest(*sorted(further)),
        "pipeline": None if pipeline is None else program_name(pipeline),
        "agent_digest": None if config.train.agent_path is None else load_agent(config.train.agent_path).digest,
        "packages": machine.packages(),
        "hardware": machine.hardware(),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Settings, code, packages and hardware that differ between two attempts, and the number of steps that settings and data make."""

    changed: Mapping[str, tuple[Any, Any]]
    """Name to its values before and now; settings as they are named, and packages.torch, hardware.cpu and the like."""
    is_exact: bool
    """Nothing that the numbers of a planned step depend on has changed."""

    def is_worth_telling(self, *, num_replanned: int) -> bool:
        """Whether this attempt differs from the one before it in anything that a step shows."""
        return bool(self.changed) or not self.is_exact or num_replanned > 0

    def told(self, *, from_step: int, num_replanned: int) -> Event:
        """The event."""
        return event(
            "settings_changed",
            from_step=from_step,
            changed=json.dumps(self.changed, sort_keys=True),
            is_exact=self.is_exact and num_replanned == 0,
            num_replanned=num_replanned,
        )

    def line(self, *, from_step: int, num_replanned: int) -> str:
        """The same in words."""
        settings = ", ".join(f"{name} {json.dumps(before)} -> {json.dumps(now)}" for name, (before, now) in self.changed.items())
        text = f"goes on from step {from_step} with {settings or 'the same settings'}"
        if num_replanned:
            text += f"; {num_replanned} planned batches are cut anew"
        if not self.is_exact or num_replanned:
            text += "; steps trained again are not bit for bit those before, replay takes each under its own settings"
        return text


def changes_since(reader: LogReader, config: Config, *, num_steps: int, pipeline: str | None = None) -> Changes | None:
    """What differs from the newest attempt in the log; None where there is none."""
    rows = reader.cut().table("events", ["lsn", "body"], where="kind = 'attempt_started'").sort_by("lsn").to_pylist()
    if not rows:
        return None
    before = json.loads(rows[-1]["body"])
    then, now = flat(json.loads(before["config"])), flat(config.model_dump(mode="json"))
    changed: dict[str, tuple[Any, Any]] = {
        name: (then[name], now[name]) for name in sorted(then.keys() & now.keys()) if then[name] != now[name]
    }
    if before["num_steps"] != num_steps and "train.num_steps" not in changed:
        changed["num_steps"] = before["num_steps"], num_steps  # the data may have grown under the same settings
    told = before | {name: json.loads(before[name]) for name in ("packages", "hardware")}
    was, made = _made_of(told), _made_of(provenance(config, pipeline))
    differing = {name: (was.get(name), made.get(name)) for name in sorted(was.keys() | made.keys()) if was.get(name) != made.get(name)}
    is_exact = trainer_settings(then, before["num_steps"]) == trainer_settings(now, num_steps) and not any(map(_is_numeric, differing))
    return Changes(changed=changed | differing, is_exact=is_exact)


def check_checkpoint(reader: LogReader, folder: Path, position: Position) -> None:
    """LogError for a checkpoint that the log does not reach; DataError where no step of the log made its weights: another run did."""
    reader.must_reach(position.lsn_end, f"checkpoint {folder.name}")
    kinds = "('attempt_started', 'step_trained', 'checkpoint_saved')"
    known: set[str] = set()
    for row in reader.cut().table("events", ["kind", "body"], where=f"kind in {kinds}").to_pylist():
        body = json.loads(row["body"])
        match row["kind"]:
            case "attempt_started" if position.step == 0:
                known.add(body["model_digest"])
            case "step_trained" if body["step"] == position.step - 1:
                known.add(body["weights_digest"])
            case "checkpoint_saved" if body["step"] == position.step:
                known.add(body["weights_digest"])
    known -= {None}  # a step between two digests
    if known and position.weights_digest not in known:
        raise DataError(
            f"checkpoint {folder.name} holds weights {position.weights_digest}, those after {position.step} steps of this run are "
            f"{' or '.join(sorted(known))}: another run wrote it; put the run's own back, or take it away and the one before is loaded"
        )


def _made_of(known: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted facts of a provenance that tell one attempt from another."""
    hardware, environment = known["hardware"], known["hardware"].get("environment", {})
    return flat(
        {
            "code_digest": known["code_digest"],
            "agent_digest": known["agent_digest"],
            "pipeline": known.get("pipeline"),
            "packages": known["packages"],
            "hardware": {name: value for name, value in hardware.items() if name in ("cpu", "cores", "gpus")},
            "environment": {name: environment[name] for name in NUMERIC_VARIABLES if name in environment},
        }
    )


def _is_numeric(name: str) -> bool:
    """Whether the numbers of a planned step depend on a fact of its provenance."""
    room, _, own = name.partition(".")
    return name == "code_digest" or room in ("hardware", "environment") or (room == "packages" and own in NUMERIC_PACKAGES)


def trainer_settings(settings: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """What the numbers of a planned step depend on. settings: dotted. num_steps: length of the schedule."""
    own = {name: value for name, value in settings.items() if name.partition(".")[0] in TRAINER_ROOMS or name in TRAINER_SETTINGS}
    return own if own.get("actor.schedule") == "constant" else own | {"num_steps": num_steps}


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted settings of a tree of them, of this version of the settings or of an older one."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
