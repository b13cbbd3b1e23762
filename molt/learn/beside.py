"""Models beside the policy: a critic that learns values, and a frozen model that is the reference or the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from molt.algo.advantage import get_estimator
from molt.algo.value import value_loss
from molt.config import ActorSettings, Config
from molt.errors import NonFiniteError, SettingError
from molt.learn.apart import refuse_leaks
from molt.learn.mesh import RankMesh
from molt.learn.model import TokenScorer, TokenValuer, load_model
from molt.learn.packing import Packed
from molt.learn.policy import Policy, Update, shard
from molt.learn.rows import MicroBatch
from molt.learn.step import Step


def needs_critic(config: Config) -> bool:
    """Whether the estimator reads values."""
    return "values" in get_estimator(config.algo.advantage.estimator).needs


def needs_frozen(config: Config) -> bool:
    """Whether something reads the log-probs of a frozen model."""
    return config.algo.kl.coef > 0 or is_distilled(config)


def is_distilled(config: Config) -> bool:
    """Whether the frozen model is a teacher."""
    return "teacher_logprobs" in get_estimator(config.algo.advantage.estimator).needs


def frozen_path(config: Config, actor_path: str) -> str:
    """Folder of the frozen model. Raises SettingError for a teacher that would be the student."""
    path = config.reference.model_name_or_path
    if path is None and is_distilled(config):
        name = config.algo.advantage.estimator
        raise SettingError(f"algo.advantage.estimator={name} needs a teacher; set reference.model_name_or_path to its folder")
    return path or actor_path


class FrozenModel:
    """A sharded model that never learns: log-probs of the sampled tokens, no graph, no optimizer."""

    def __init__(self, path: str, config: Config, mesh: RankMesh, *, num_entries: int | None = None) -> None:
        """num_entries: of the vocabulary of the policy, to be compared; another vocabulary would score other tokens."""
        actor = config.actor.model_copy(update={"gradient_checkpointing": False, "freeze_moe_router": False})
        own: dict[str, object] = {"offload": "full" if config.reference.offload else "none", "reshard_after_forward": True}
        fsdp = config.fsdp.model_copy(update=own)
        scorer = load_model(path, actor, fsdp, is_deferred=True)
        entries = vocab_size(scorer)
        if num_entries is not None and entries != num_entries:
            raise SettingError(
                f"reference.model_name_or_path={path}, its vocabulary has {entries} entries, the policy's {num_entries}; they must share it"
            )
        self.device = mesh.device
        self.scorer = cast(Any, shard(scorer.requires_grad_(False), actor, fsdp, mesh))
        if fsdp.packing_check:
            refuse_leaks(self._score, self.scorer.lm.config, path=path, attention=fsdp.attn_implementation)
            self.scorer.reshard()

    def score(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probs of each micro-batch, on the CPU. A collective."""
        columns = [_own(batch, self._score(batch.packed)) for batch in batches]
        self.scorer.reshard()
        return columns

    @torch.no_grad()
    def _score(self, packed: Packed) -> torch.Tensor:
        """(N,) log-probs."""
        logprobs: torch.Tensor = self.scorer(packed.to(self.device))[0]
        return logprobs


class Critic:
    """The value model under its own optimizer. Its value of a token is that of the state before the token was sampled."""

    def __init__(self, config: Config, mesh: RankMesh, *, actor_path: str, num_steps: int) -> None:
        self.config = config
        path = config.critic.model_name_or_path or actor_path
        settings = _critic_settings(config)
        valuer = TokenValuer(load_model(path, settings, config.fsdp, is_deferred=True), head=value_head(Path(path)))
        self.policy = Policy(valuer, settings, config.fsdp, mesh=mesh, num_steps=num_steps)

    def values(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Values of each micro-batch, on the CPU, without a graph. A collective."""
        return [_own(batch, self.policy.score(batch.packed)[0]) for batch in batches]

    def accumulate(self, step: Step) -> None:
        """Gradient of the value loss over all micro-batches; sums go to the step. A collective."""
        sums: dict[str, float] = {}
        for number, batch in enumerate(step.batches):
            self.policy.begin(is_last=number == len(step.batches) - 1)
            values, _ = self.policy(batch.packed)
            if batch.is_dummy:
                (values.sum() * 0.0).backward()
                continue
            device = values.device
            output = value_loss(
                values,
                step.columns.values[number].to(device),
                step.known.returns_of(batch).to(device),
                step.known.value_scale_of(batch).to(device),
                clip=self.config.critic.value_clip,
            )
            output.loss.backward()
            sums["loss"] = sums.get("loss", 0.0) + float(output.loss.detach())
            for name, value in output.metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        step.sums.value_sums = sums

    def measure(self) -> torch.Tensor:
        """Gradient norm over all ranks. Raises NonFiniteError; nothing is kept then."""
        try:
            return self.policy.gradient_norm()
        except NonFiniteError as error:
            raise NonFiniteError(f"critic: {error}") from error

    def apply(self, norm: torch.Tensor) -> Update:
        """Clip and step."""
        return self.policy.apply(norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a rank has beside its policy."""

    critic: Critic | None = None
    frozen: FrozenModel | None = None


def value_head(folder: Path) -> dict[str, torch.Tensor] | None:
    """Weights of the value head in a saved critic folder; None in the folder of a language model."""
    file = folder / "value_head.safetensors"
    if not file.is_file():
        return None
    from safetensors.torch import load_file

    return load_file(file)


def vocab_size(scorer: TokenScorer) -> int:
    """Entries of the vocabulary."""
    return int(scorer.lm.config.get_text_config().vocab_size)


def _critic_settings(config: Config) -> ActorSettings:
    """The actor's settings with the critic's learning rate; its schedule is constant."""
    changes = {"learning_rate": config.critic.learning_rate, "schedule": "constant", "warmup_steps": 0, "freeze_moe_router": False}
    return config.actor.model_copy(update=changes)


def _own(batch: MicroBatch, column: torch.Tensor) -> torch.Tensor:
    """The column on the CPU; nothing of a dummy."""
    return column[:0].cpu() if batch.is_dummy else column.cpu()
