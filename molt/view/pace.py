"""How fast a run goes: steps, time left, effective tokens per second, from what each step says of itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW = 20
"""Steps that rates are taken over."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """Takes the end of each step with its time."""

    num_steps: int | None
    """Steps of the whole run; None when unknown."""
    began: float
    """Seconds, of the clock that times are given in."""
    times: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    kept: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    step: int | None = None
    """Newest step, from 0."""

    def add(self, now: float, figures: Mapping[str, Any]) -> None:
        """Note the end of a step."""
        if not self.times:
            # The first step took what it says; what came before it was starting up.
            took = [figures[name] for name in ("wait_s", "train_s") if figures.get(name) is not None]
            self.times.append(max(self.began, now - sum(took)) if took else self.began)
        self.times.append(now)
        self.step = figures.get("step", 0 if self.step is None else self.step + 1)
        self.kept.append(int(figures.get("n_kept") or 0))
        if figures.get("reward") is not None:
            self.rewards.append(float(figures["reward"]))

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the window; None before the first step."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def tokens_per_s(self) -> float | None:
        """Effective tokens: sampled, kept by the gate and trained, by the clock on the wall, over the window."""
        elapsed = self.times[-1] - self.times[0] if len(self.times) > 1 else 0.0
        return sum(self.kept) / elapsed if elapsed > 0 else None

    @property
    def reward(self) -> float | None:
        """Mean reward over the window."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def eta_s(self) -> float | None:
        """Seconds left at this pace; None when unknown."""
        pace = self.seconds_per_step
        if pace is None or self.num_steps is None or self.step is None:
            return None
        return max(0, self.num_steps - self.step - 1) * pace


def duration(seconds: float | None) -> str:
    """Seconds as 1h02m, 3m05s or 7s; - when unknown."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
