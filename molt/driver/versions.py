"""When the engines get new weights: the count of policy versions, by steps."""

from __future__ import annotations

from dataclasses import dataclass

from molt.config import Config


@dataclass(slots=True, kw_only=True)
class VersionClock:
    """Counts refits. A version lasts for steps_per_version planned steps; one in which no step was made brings no new version."""

    steps_per_version: int
    version: int = 0
    """What the engines serve."""
    num_planned: int = 0
    """Steps since the version began, refused ones too."""
    num_trained: int = 0
    """Steps made among them."""

    @classmethod
    def of(cls, config: Config, version: int = 0) -> VersionClock:
        """The clock of a run that stands at the beginning of a version."""
        return cls(steps_per_version=config.rollout.batch_size // config.groups_per_step, version=version)

    @property
    def weights_version(self) -> int:
        """The version that the trainer's weights are: the next one as soon as they moved, since engines serve others as this one."""
        return self.version + (self.num_trained > 0)

    @property
    def is_boundary(self) -> bool:
        """Whether a version has just begun. Checkpoints are made here only, and at the end of an attempt: the next one begins a version."""
        return self.num_planned == 0

    def tick(self, *, is_trained: bool) -> bool:
        """Note the end of a step; True when a new version is due, which is then counted."""
        self.num_planned += 1
        self.num_trained += is_trained
        if self.num_planned < self.steps_per_version:
            return False
        is_due = self.num_trained > 0
        self._begin(self.version + is_due)
        return is_due

    def follow(self, version: int) -> None:
        """Take up the version that a recorded plan was made under: where an attempt ended inside a version, the next began another."""
        if version > self.version:
            self._begin(version)

    def _begin(self, version: int) -> None:
        self.version = version
        self.num_planned = self.num_trained = 0
