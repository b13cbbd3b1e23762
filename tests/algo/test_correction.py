"""What the importance gate keeps, and with what weight."""

from __future__ import annotations

import math

import pytest
import torch

from molt.algo.correction import binary_divergence, importance_gate
from molt.errors import LineageError, NonFiniteError, SettingError
from tests.algo.build import NAN, algo


def gate(log_ratios, level, mode="mask", band=(None, None), *, segments=None, **extra):
    """Gate over tokens with the given log-ratios; behaviour log-prob -1 everywhere."""
    behaviour_T = torch.full((len(log_ratios),), -1.0)
    keys = {"is_correction_level": level, "is_correction_mode": mode, "is_correction_threshold": band}
    settings = {key: extra.pop(key) for key in ("gate", "decoupled", "is_mismatch_threshold") if key in extra}
    segment_T = torch.tensor(segments if segments is not None else [0] * len(log_ratios), dtype=torch.int64)
    return importance_gate(behaviour_T + torch.tensor(log_ratios), behaviour_T, segment_T, algo(advantage=keys | settings), **extra)


LN = math.log


def test_divergence_of_a_segment_is_the_mean_over_its_tokens():
    # p = 0.5, q = 0.5 and 0.25: tv 0 and 0.25, mean 0.125; own ratios 1 and 0.5
    settings = algo(advantage={"is_correction_level": "seq", "gate": "tv", "is_correction_threshold": (None, 0.13)})
    target_T, source_T = torch.tensor([LN(0.5), LN(0.25)]), torch.tensor([LN(0.5), LN(0.5)])
    found = importance_gate(target_T, source_T, torch.tensor([0, 0]), settings)
    assert found.is_kept_T.tolist() == [True, True]
    assert found.weights_T.tolist() == pytest.approx([1.0, 0.5])
    tight = algo(advantage={"is_correction_level": "seq", "gate": "tv", "is_correction_threshold": (None, 0.12)})
    assert importance_gate(target_T, source_T, torch.tensor([0, 0]), tight).is_kept_T.tolist() == [False, False]


def test_token_mask_drops_what_lies_outside():
    found = gate([LN(0.4), 0.0, LN(6.0)], "token")
    assert found.band == (0.5, 5.0)
    assert found.weights_T.tolist() == [0.0, 1.0, 0.0]
    assert found.n_kept_S.tolist() == [1]
    assert found.n_tokens_S.tolist() == [3]


def test_a_kept_token_weighs_its_own_ratio():
    torch.testing.assert_close(gate([LN(2.0), LN(0.6)], "token").weights_T, torch.tensor([2.0, 0.6]))


def test_token_clip_and_trunc_keep_everything():
    clip = gate([LN(0.4), 0.0, LN(6.0)], "token", "clip")
    trunc = gate([LN(0.4), 0.0, LN(6.0)], "token", "trunc")
    torch.testing.assert_close(clip.weights_T, torch.tensor([0.5, 1.0, 5.0]))
    torch.testing.assert_close(trunc.weights_T, torch.tensor([0.4, 1.0, 5.0]))
    assert clip.n_kept_S.tolist() == trunc.n_kept_S.tolist() == [3]


def test_sequence_level_takes_the_product():
    # segment 0: 1.5 * 1.2 = 1.8 inside (0.5, 2); segment 1: 1.5 * 1.5 = 2.25 outside
    found = gate([LN(1.5), LN(1.2), LN(1.5), LN(1.5)], "seq", segments=[0, 0, 1, 1])
    torch.testing.assert_close(found.weights_T, torch.tensor([1.8, 1.8, 0.0, 0.0]))


def test_geometric_mask_keeps_own_ratios():
    # segment 0: mean log-ratio 0 inside (0.999, 1.002), tokens keep 2 and 0.5; segment 1: sqrt(2) outside
    found = gate([LN(2.0), LN(0.5), LN(2.0), 0.0], "geo", segments=[0, 0, 1, 1])
    torch.testing.assert_close(found.weights_T, torch.tensor([2.0, 0.5, 0.0, 0.0]))


def test_geometric_trunc_bounds_the_mean():
    found = gate([LN(2.0), LN(8.0), LN(0.5), LN(0.5)], "geo", "trunc", (None, 3.0), segments=[0, 0, 1, 1])
    torch.testing.assert_close(found.weights_T, torch.tensor([3.0, 3.0, 0.5, 0.5]))  # sqrt(16) = 4 is bounded by 3


@pytest.mark.parametrize("mode", ["mask", "clip", "trunc"])
def test_three_hundred_shrinking_ratios_stay_finite(mode):
    # 0.7^300 = 3.4e-47 underflows float32; in log space it is -107
    found = gate([LN(0.7)] * 300, "seq", mode)
    assert torch.isfinite(found.weights_T).all()
    assert found.weights_T[0] == {"mask": 0.0, "clip": 0.5}.get(mode, pytest.approx(math.exp(-20), rel=1e-5))
    assert gate([LN(0.7)] * 300, "geo", mode, (0.5, 2.0) if mode != "trunc" else (None, 2.0)).weights_T[0] == pytest.approx(0.7)


def test_a_small_drift_is_kept_by_the_mean_and_cut_by_the_product():
    # 300 * 0.005 = 1.5: product 4.48, geometric mean 1.005
    assert gate([0.005] * 300, "geo", "mask", (0.99, 1.01)).n_kept_S.tolist() == [300]
    assert gate([0.005] * 300, "seq", "trunc").weights_T[0] == 2.0
    assert gate([0.005] * 300, "seq", "mask").n_kept_S.tolist() == [0]


def test_a_weight_never_overflows():
    found = gate([200.0, -200.0], "geo")  # mean 0: kept, with own ratios e^200 and e^-200
    assert found.weights_T.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_off_weighs_every_token_with_one():
    found = gate([3.0, -3.0], "off")
    assert found.weights_T.tolist() == [1.0, 1.0]
    assert found.band == (None, None)
    assert found.log_ratio_min_S.tolist() == [-3.0]
    assert found.ratio_mean_S.tolist() == pytest.approx([math.cosh(3.0)])


def test_masked_tokens_have_weight_zero_and_no_say():
    # the masked token's ratio of e^3 would push the segment out
    found = gate([3.0, 0.0], "seq", is_trainable_T=torch.tensor([False, True]))
    assert found.weights_T.tolist() == [0.0, 1.0]
    assert found.log_ratio_max_S.tolist() == [0.0]


def test_a_wholly_masked_segment_has_no_statistics():
    found = gate([1.0, 0.0], "geo", segments=[0, 1], is_trainable_T=torch.tensor([False, True]))
    assert found.n_kept_S.tolist() == [0, 1]
    assert math.isnan(found.ratio_mean_S[0]) and math.isnan(found.log_ratio_min_S[0])


def test_a_segment_without_sampled_tokens_has_a_row():
    found = gate([0.0], "seq", segments=[1], num_segments=3)
    assert found.n_tokens_S.tolist() == [0, 1, 0]


def test_an_empty_batch_has_an_empty_gate():
    assert gate([], "geo").weights_T.shape == (0,)


def test_masked_placeholders_do_not_matter():
    behaviour_T, trainer_T = torch.tensor([NAN, -1.0]), torch.tensor([float("inf"), -1.0])
    settings = algo(advantage={"is_correction_level": "token"})
    found = importance_gate(trainer_T, behaviour_T, torch.tensor([0, 0]), settings, is_trainable_T=torch.tensor([False, True]))
    assert found.weights_T.tolist() == [0.0, 1.0]


def test_an_unknown_behaviour_logprob_is_refused_by_place():
    with pytest.raises(LineageError, match=r"behaviour log-prob of sampled token 1 in segment 1 .* is nan: unknown"):
        importance_gate(torch.zeros(4), torch.tensor([0.0, 0.0, 0.0, NAN]), torch.tensor([0, 0, 1, 1]), algo())


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")])
def test_a_trainer_logprob_that_is_not_finite_is_refused_by_place(value):
    with pytest.raises(NonFiniteError, match="trainer log-prob of sampled token 0 in segment 1"):
        importance_gate(torch.tensor([0.0, 0.0, value]), torch.zeros(3), torch.tensor([0, 0, 1]), algo())


def test_a_behaviour_logprob_of_minus_infinity_is_refused():
    with pytest.raises(NonFiniteError, match="behaviour log-prob"):
        importance_gate(torch.zeros(1), torch.tensor([float("-inf")]), torch.tensor([0]), algo())


def test_mixed_versions_without_correction_are_refused():
    with pytest.raises(LineageError, match=r"segment 1 .* several policy versions and algo.advantage.is_correction_level=off"):
        gate([0.0] * 3, "off", segments=[0, 1, 1], version_T=torch.tensor([3, 3, 4]))
    assert gate([0.0] * 2, "off", segments=[0, 1], version_T=torch.tensor([3, 4])).n_kept_S.tolist() == [1, 1]


def test_the_gate_carries_no_gradient():
    trainer_T = torch.zeros(2, requires_grad=True)
    found = importance_gate(trainer_T, torch.zeros(2), torch.tensor([0, 0]), algo(advantage={"is_correction_level": "token"}))
    assert not found.weights_T.requires_grad


def test_binary_divergence_by_hand():
    # p = 0.5, q = 0.25: tv 0.25; kl 0.5 ln 2 + 0.5 ln(0.5 / 0.75) = 0.143841
    p, q = torch.tensor([LN(0.5)]), torch.tensor([LN(0.25)])
    assert binary_divergence("tv", q, p).item() == pytest.approx(0.25, abs=1e-7)
    assert binary_divergence("kl", q, p).item() == pytest.approx(0.5 * LN(2) + 0.5 * LN(0.5 / 0.75), abs=1e-7)


def test_binary_divergence_at_the_ends_is_finite():
    certain, rare = torch.tensor([0.0]), torch.tensor([-50.0])
    for kind in ("kl", "tv"):
        for target, source in ((certain, certain), (certain, rare), (rare, certain), (rare, rare)):
            assert torch.isfinite(binary_divergence(kind, target, source)).all()
    assert binary_divergence("kl", certain, certain).item() == 0.0


def test_divergence_gates_bound_what_a_ratio_overrates():
    # p = e^-8 to e^-6: ratio 7.4 is outside (0.5, 5), yet only 0.002 of probability moved
    rare_source, rare_target = torch.tensor([-8.0]), torch.tensor([-6.0])
    common_source, common_target = torch.tensor([LN(0.9)]), torch.tensor([LN(0.5)])
    for kind in ("kl", "tv"):
        settings = algo(advantage={"is_correction_level": "token", "gate": kind})
        assert importance_gate(rare_target, rare_source, torch.tensor([0]), settings).n_kept_S.tolist() == [1]
        assert importance_gate(common_target, common_source, torch.tensor([0]), settings).n_kept_S.tolist() == [0]


def test_decoupled_bounds_staleness_and_mismatch_apart():
    # tokens of version 5 (now) and 3; mismatch band 0.9..1.1, staleness band 0.5..5
    log_ratios = [LN(1.05), LN(1.5), LN(1.5), LN(8.0)]
    found = gate(
        log_ratios,
        "token",
        "mask",
        (0.5, 5.0),
        decoupled=True,
        is_mismatch_threshold=(0.9, 1.1),
        version_T=torch.tensor([5, 5, 3, 3]),
        trainer_version=5,
    )
    # 1.05 fits as mismatch; 1.5 does not; 1.5 fits as staleness; 8 does not
    torch.testing.assert_close(found.weights_T, torch.tensor([1.05, 0.0, 1.5, 0.0]))


def test_decoupled_sequence_falls_as_a_whole():
    # the stale half is out of its band, so the fresh half goes with it
    found = gate([0.0, LN(8.0)], "seq", decoupled=True, version_T=torch.tensor([5, 3]), trainer_version=5, is_mismatch_threshold=(0.9, 1.1))
    assert found.weights_T.tolist() == [0.0, 0.0]


def test_decoupled_without_versions_is_refused():
    with pytest.raises(LineageError, match="policy version of every token"):
        gate([0.0], "token", decoupled=True)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"is_correction_threshold": (0.5, 5.0)}, "does nothing under .*is_correction_level=off"),
        ({"decoupled": True}, "decoupled=true does nothing"),
        ({"gate": "tv"}, "gate=tv does nothing"),
        ({"is_correction_level": "token", "gate": "kl", "is_correction_mode": "clip"}, "gate=kl needs .*mode=mask, got clip"),
        ({"is_correction_level": "token", "gate": "kl", "is_correction_threshold": (0.1, 0.2)}, "bounded from above only"),
        ({"is_correction_level": "seq", "is_correction_mode": "trunc", "is_correction_threshold": (0.5, 2.0)}, "use clip for both ends"),
        ({"is_correction_level": "geo", "gate": "kl"}, "gate=kl has none; set the level to seq"),
        ({"is_correction_level": "geo", "is_correction_threshold": (1.1, 2.0)}, "must hold the ratio 1"),
        ({"is_correction_level": "geo", "is_mismatch_threshold": (0.9, 2.0)}, "needs .*decoupled=true"),
    ],
)
def test_a_correction_that_cannot_mean_what_it_says_is_refused(keys, text):
    with pytest.raises(SettingError, match=text):
        importance_gate(torch.zeros(1), torch.zeros(1), torch.tensor([0]), algo(advantage=keys))


def test_one_open_end_stays_open():
    found = gate([LN(0.001), LN(3.0)], "token", "mask", (None, 2.0))
    assert found.is_kept_T.tolist() == [True, False]


def test_a_million_tokens():
    # 2^-20 is exact beside -1 in float32: the product of 1e6 such ratios is exp(1e6 / 2^20) = 2.5951
    found = gate([2.0**-20] * 1_000_000, "seq", "clip", (0.5, 5.0))
    assert found.weights_T[0] == pytest.approx(math.exp(1e6 / 2**20), rel=1e-6)
    assert found.n_kept_S.tolist() == [1_000_000]
