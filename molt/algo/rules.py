"""Rules between the settings of the algorithm, and the published default bands; imports neither torch nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from molt.errors import SettingError

if TYPE_CHECKING:
    from molt.config import AdvantageSettings, AlgoSettings

Band = tuple[float | None, float | None]

RATIO_BANDS: dict[tuple[str, str], Band] = {
    ("token", "mask"): (0.5, 5.0),
    ("token", "clip"): (0.5, 5.0),
    ("token", "trunc"): (None, 5.0),
    ("seq", "mask"): (0.5, 2.0),
    ("seq", "clip"): (0.5, 2.0),
    ("seq", "trunc"): (None, 2.0),
    ("geo", "mask"): (0.999, 1.002),
    ("geo", "clip"): (0.999, 1.002),
    ("geo", "trunc"): (None, 1.002),
}
"""Band of the ratio by (level, mode). token: NeMo RL's ProRLv2 guide (icepop and tis, 0.5 to 5); seq: verl's rollout correction
(2, and its reciprocal); geo: the sequence filter on the geometric mean of the same guide."""

DIVERGENCE_BANDS: dict[tuple[str, str], Band] = {
    ("kl", "token"): (None, 0.05),
    ("kl", "seq"): (None, 0.005),
    ("tv", "token"): (None, 0.15),
    ("tv", "seq"): (None, 0.05),
}
"""Upper end of the binary divergence by (gate, level); seq is the mean over the tokens of a segment. token: TRL's DPPO, after arXiv
2602.04879; kl by seq: the published FlashREINFORCE recipe; tv by seq: what that kl allows at most, sqrt(kl / 2) by Pinsker's inequality."""


def band(settings: AdvantageSettings) -> Band:
    """The band in force: the one given, or the published one when both ends are absent. (None, None) when off."""
    return _band(settings, settings.is_correction_threshold)


def mismatch_band(settings: AdvantageSettings) -> Band:
    """The band of kernel mismatch under algo.advantage.decoupled: the one given, or the published one."""
    return _band(settings, settings.is_mismatch_threshold)


def _band(settings: AdvantageSettings, given: Band) -> Band:
    if settings.is_correction_level == "off":
        return (None, None)
    if given != (None, None):
        return given
    if settings.gate != "ratio":
        return DIVERGENCE_BANDS[settings.gate, settings.is_correction_level]
    return RATIO_BANDS[settings.is_correction_level, settings.is_correction_mode]


def check_correction(settings: AdvantageSettings) -> None:
    """SettingError for a correction that cannot mean what it says."""
    name = "algo.advantage"
    if settings.is_correction_level == "off":
        for key in ("is_correction_threshold", "is_mismatch_threshold"):
            if getattr(settings, key) != (None, None):
                raise SettingError(
                    f"{name}.{key}={getattr(settings, key)} does nothing under {name}.is_correction_level=off; set a level or drop the band"
                )
        if settings.decoupled or settings.gate != "ratio":
            key, value = ("decoupled", "true") if settings.decoupled else ("gate", settings.gate)
            raise SettingError(f"{name}.{key}={value} does nothing under {name}.is_correction_level=off; set a level: token, seq or geo")
        return
    if settings.is_mismatch_threshold != (None, None) and not settings.decoupled:
        raise SettingError(f"{name}.is_mismatch_threshold={settings.is_mismatch_threshold} needs {name}.decoupled=true")
    if settings.gate != "ratio" and settings.is_correction_mode != "mask":
        raise SettingError(
            f"{name}.gate={settings.gate} needs {name}.is_correction_mode=mask, got {settings.is_correction_mode}: "
            "a divergence has no weight to bound"
        )
    if settings.gate != "ratio" and settings.is_correction_level == "geo":
        raise SettingError(
            f"{name}.is_correction_level=geo is the geometric mean of ratios and {name}.gate={settings.gate} has none; "
            "set the level to seq, which bounds the mean divergence of a segment"
        )
    for key in ("is_correction_threshold", "is_mismatch_threshold"):
        _check_band(settings, f"{name}.{key}", getattr(settings, key))


def _check_band(settings: AdvantageSettings, key: str, given: Band) -> None:
    low, high = given
    if given == (None, None):
        return
    if settings.gate != "ratio":
        if low is not None or high is None or high <= 0:
            raise SettingError(f"{key}={given}: a divergence is bounded from above only; give (none, high) with high > 0")
        return
    if settings.is_correction_mode == "trunc" and (low is not None or high is None):
        raise SettingError(f"{key}={given}: trunc bounds the weight from above only; give (none, high), or use clip for both ends")
    if (low is not None and not 0 <= low <= 1) or (high is not None and not high >= 1):
        raise SettingError(f"{key}={given} must hold the ratio 1 (low in [0, 1], high >= 1), or on-policy tokens would be rejected")


def check_estimator(settings: AlgoSettings, *, name: str, uses: frozenset[str], needs: frozenset[str]) -> None:
    """SettingError for an estimator's setting that does nothing, or a model that it needs and settings do not give."""
    for key, neutral in (("gamma", 1.0), ("lambd", 1.0)):
        if key not in uses and getattr(settings.advantage, key) != neutral:
            given = getattr(settings.advantage, key)
            raise SettingError(f"algo.advantage.{key}={given} does nothing under algo.advantage.estimator={name}; leave it at {neutral}")
    if settings.kl.use == "reward" and settings.kl.coef > 0 and "teacher_logprobs" in needs:
        raise SettingError(
            f"algo.kl.use=reward does nothing under algo.advantage.estimator={name}, which reads no reward; use algo.kl.use=loss"
        )


def check_loss(settings: AlgoSettings) -> None:
    """SettingError for a loss setting that does nothing or cannot hold."""
    loss, kl = settings.loss, settings.kl
    if loss.dual_clip is not None and (loss.name != "ppo" or loss.dual_clip <= 1):
        raise SettingError(
            f"algo.loss.dual_clip={loss.dual_clip} needs algo.loss.name=ppo and a value above 1, got algo.loss.name={loss.name}"
        )
    if kl.target is not None and (kl.coef == 0 or kl.target <= 0):
        raise SettingError(f"algo.kl.target={kl.target} needs algo.kl.coef > 0 to start from, got {kl.coef}, and a target > 0")


def check_algo(settings: AlgoSettings) -> None:
    """Every rule that needs no estimator at hand."""
    check_correction(settings.advantage)
    check_loss(settings)
    reward = settings.reward
    if reward.clip is not None and not reward.clip[0] <= reward.clip[1]:
        raise SettingError(f"algo.reward.clip={reward.clip} has its ends the wrong way round")
    if reward.filter_range is not None and not reward.filter_range[0] < reward.filter_range[1]:
        raise SettingError(f"algo.reward.filter_range={reward.filter_range} keeps nothing; the low end must be below the high end")
    if reward.stop_properly_penalty is not None and not 0 <= reward.stop_properly_penalty <= 1:
        raise SettingError(f"algo.reward.stop_properly_penalty={reward.stop_properly_penalty} is a factor and must lie in [0, 1]")
