"""When the engines get new weights: the count of policy versions, by steps."""

from __future__ import annotations

from dataclasses import dataclass

from molt.config import Config


@dataclass(slots=True, kw_only=True)
class VersionClock:
    """Counts refits. A version lasts for steps_per_version planned steps; one in which no step was made brings no new version."""

    steps_per_version: int
    version: int = 0
    num_trained: int = 0
    """Steps made since the last new version."""

    @classmethod
    def of(cls, config: Config, version: int = 0) -> VersionClock:
        """The clock of a run that stands at a version."""
        return cls(steps_per_version=config.rollout.batch_size // config.groups_per_step, version=version)

    def tick(self, step: int, *, is_trained: bool) -> bool:
        """Note the end of a step; True when a new version is due, which is then counted."""
        self.num_trained += is_trained
        if not self.is_boundary(step) or self.num_trained == 0:
            return False
        self.version += 1
        self.num_trained = 0
        return True

    def is_boundary(self, step: int) -> bool:
        """Whether a version ends with this step. Checkpoints are made here only, so that a version never begins in the middle."""
        return (step + 1) % self.steps_per_version == 0
