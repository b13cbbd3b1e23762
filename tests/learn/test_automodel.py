"""NeMo AutoModel behind the seam: the same log-probs, steps, names and replay as the Hugging Face class; sizes refused by reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from molt.config import ActorSettings, FsdpSettings
from molt.errors import SettingError
from molt.learn.automodel import cudnn_parts, te_backward_bytes
from molt.learn.model import load_model, uses_automodel
from molt.learn.packing import pack
from molt.learn.routes import Routes
from molt.learn.weights import sent_tensors
from tests.groups import leave_group
from tests.learn import automodel_shim
from tests.learn.tiny import make_config, make_model, make_moe, make_plan, make_rank, make_rows

pytestmark = [
    pytest.mark.skipif(find_spec("nemo_automodel") is None, reason="nemo-automodel is not installed"),
    pytest.mark.filterwarnings("ignore"),  # the package warns at import about kernels that are not there
]
AUTOMODEL, HF = ActorSettings(implementation="automodel"), ActorSettings(implementation="hf")


@pytest.fixture(autouse=True)
def without_cuda() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        automodel_shim.install(patch)
        yield


@pytest.fixture(scope="module", params=["dense", "moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = make_model if request.param == "dense" else make_moe
    return make(tmp_path_factory.mktemp(request.param))


def test_log_probs_entropies_and_gradients_equal_the_hugging_face_class(folder: Path) -> None:
    rows = make_rows(4)
    packed = pack([r.token_ids for r in rows], [r.is_sampled for r in rows])
    found = []
    for actor in (HF, AUTOMODEL):
        scorer = load_model(str(folder), actor, FsdpSettings())
        logprobs, entropy = scorer(packed, True)
        (logprobs.sum() + entropy.sum()).backward()
        # the embedding is the one parameter that both keep under the same name and shape, whatever the experts' layout
        found.append((logprobs.detach(), entropy.detach(), scorer.lm.model.embed_tokens.weight.grad))
    assert "nemo_automodel" in type(scorer.lm).__module__
    # float32, two layers: a few roundings of log-probs near 5, and of gradients near 20 that are sums over all tokens
    for hf, automodel, tolerance in zip(*found, (1e-5, 1e-5, 1e-3), strict=True):
        assert torch.allclose(hf, automodel, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sdpa", "flex"])
def test_rows_do_not_see_each_other(folder: Path, kind: Literal["sdpa", "flex"]) -> None:
    rows = make_rows(3)
    ids, masks = [r.token_ids for r in rows], [r.is_sampled for r in rows]
    scorer = load_model(str(folder), AUTOMODEL, FsdpSettings(attn_implementation=kind))
    before = scorer(pack(ids, masks))[0].detach()
    alone = torch.cat([scorer(pack([i], [m]))[0].detach() for i, m in zip(ids, masks, strict=True)])
    assert torch.allclose(before, alone, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_and_published_names_equal_the_hugging_face_class(folder: Path, checkpointing: bool) -> None:
    rows, tensors, results = make_rows(6), [], []
    for name in ("hf", "automodel"):
        config = make_config(folder, actor={"implementation": name, "learning_rate": 1e-4, "gradient_checkpointing": checkpointing})
        rank = make_rank(config, rows)
        results.append([rank.train(make_plan(rows, step=step)) for step in range(2)])
        tensors.append(sent_tensors(rank.policy))
    for hf, automodel in zip(*results, strict=True):
        assert abs(hf.loss - automodel.loss) < 1e-5 and abs(hf.grad_norm - automodel.grad_norm) < 1e-5 * hf.grad_norm
    assert set(tensors[0]) == set(tensors[1])
    # two steps of AdamW at 1e-4: a weight whose gradient is rounding noise may go either way
    assert all((tensors[0][n] - tensors[1][n]).abs().max() <= 4.1e-4 for n in tensors[0])


def test_routes_of_the_engine_are_replayed(tmp_path: Path) -> None:
    folder = make_moe(tmp_path)
    rows = make_rows(2)
    generator = np.random.default_rng(0)
    routes = [
        np.stack([generator.permutation(8)[:2] for _ in range(2 * len(r.token_ids))]).reshape(-1, 2, 2).astype(np.int16) for r in rows
    ]
    routes[1][3:] = -1
    found = []
    for actor in (HF, AUTOMODEL):
        scorer = load_model(str(folder), actor, FsdpSettings())
        scorer.routes = Routes.install(scorer.lm)
        packed = pack([r.token_ids for r in rows], [r.is_sampled for r in rows], routes=list(routes))
        found.append(scorer(packed)[0].detach())
        (count, _) = scorer.routes.take_counts()
        assert count.n_replayed == len(rows[0].token_ids) + 3
    assert torch.allclose(*found, atol=1e-5)


def test_sizes_and_attentions_that_cannot_be_had_are_refused_with_the_reason(folder: Path) -> None:
    for fsdp, reason in (
        (FsdpSettings(tp_size=2), "fsdp.tp_size=2 with actor.implementation=automodel"),
        (FsdpSettings(attn_implementation="eager"), "AutoModel has sdpa, te, flex"),
        (FsdpSettings(attn_implementation="te"), "cannot be used: it is not installed"),
    ):
        with pytest.raises(SettingError, match=reason):
            load_model(str(folder), AUTOMODEL, fsdp)


def test_transformer_engine_that_does_not_load_is_refused_with_what_it_raised(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text("raise OSError('libcudnn_graph.so.9: no such file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # put back at the end, so that the package below is forgotten
    del sys.modules["transformer_engine"]
    with pytest.raises(SettingError, match=r"OSError: libcudnn_graph.so.9: no such file; install it"):
        load_model(str(folder), ActorSettings(implementation="automodel"), FsdpSettings(attn_implementation="te"))


def test_automodel_is_taken_by_itself_only_on_a_gpu() -> None:
    assert uses_automodel(AUTOMODEL, FsdpSettings()) and not uses_automodel(HF, FsdpSettings())
    assert uses_automodel(ActorSettings(), FsdpSettings()) == torch.cuda.is_available()


def _train_with_experts_apart(rank: int, num_ranks: int, folder: str, out: str) -> None:
    """One process: AutoModel with its experts over two ranks, or the Hugging Face class on one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}/store{num_ranks}", num_ranks), rank=rank, world_size=num_ranks)
    rows, implementation = make_rows(6), "hf"
    if num_ranks > 1:
        automodel_shim.install(pytest.MonkeyPatch())
        implementation = "automodel"
    actor = {"implementation": implementation, "learning_rate": 1e-3}
    config = make_config(Path(folder), actor=actor, fsdp={"num_ranks": num_ranks, "ep_size": num_ranks})
    worker = make_rank(config, rows)
    results = [worker.train(make_plan(rows, step=step, num_ranks=num_ranks, micro_batch_tokens=32)) for step in range(2)]
    tensors = sent_tensors(worker.policy)
    if rank == 0:
        torch.save(([(r.loss, r.grad_norm) for r in results], tensors), f"{out}/result{num_ranks}")
    leave_group()


@pytest.mark.slow
def test_experts_over_two_ranks_equal_one_rank_of_the_hugging_face_class(tmp_path: Path) -> None:
    folder = make_moe(tmp_path / "moe")
    found = []
    for num_ranks in (1, 2):
        mp.spawn(_train_with_experts_apart, (num_ranks, str(folder), str(tmp_path)), nprocs=num_ranks)
        found.append(torch.load(tmp_path / f"result{num_ranks}"))
    (numbers_one, one), (numbers_two, two) = found
    for (loss, norm), (other_loss, other_norm) in zip(numbers_one, numbers_two, strict=True):
        assert abs(loss - other_loss) < 1e-6 and abs(norm - other_norm) < 1e-5 * norm  # no balancing loss hides in the gradient
    assert max(float((one[n] - two[n]).abs().max()) for n in one) < 1e-5  # float32 sums in another order, two steps at 1e-3


def test_transformer_engine_gets_every_part_of_the_cudnn_that_torch_loaded(tmp_path: Path) -> None:
    """Parts of two versions in one process: "libcudnn_heuristic.so.9: undefined symbol ..., version libcudnn_graph.so.9"."""
    own, maps = tmp_path / "cudnn", tmp_path / "maps"
    own.mkdir()
    for name in ("libcudnn.so.9", "libcudnn_adv.so.9", "libcudnn_graph.so.9", "libcublas.so.13"):
        (own / name).touch()
    maps.write_text(f"7f01-7f02 r-xp 00 00:2b 11 /usr/lib/libcudart.so.13\n7f03-7f04 r-xp 00 00:2b 12 {own}/libcudnn.so.9\n")
    assert [part.name for part in cudnn_parts(maps)] == ["libcudnn_graph.so.9", "libcudnn.so.9", "libcudnn_adv.so.9"]
    assert cudnn_parts(tmp_path / "none") == []  # no such file on other systems
    maps.write_text("7f01-7f02 r-xp 00 00:2b 11 /usr/lib/libc.so.6\n")
    assert cudnn_parts(maps) == []


@pytest.mark.parametrize(
    "lengths, config, expected",
    [
        ([110] * 128, {"num_attention_heads": 9, "hidden_size": 576}, 576 * 2**30),  # 14,080 tokens count as 16,384
        ([1024], {"num_attention_heads": 32, "hidden_size": 2560, "head_dim": 128}, 4 * 32 * 128 * 1024 * 8),
        ([60] * 3, {"num_attention_heads": 2, "hidden_size": 8}, 4 * 8 * 4 * 256 * 2),
        ([2], {"num_attention_heads": 2, "hidden_size": 8}, 4 * 8 * 2),
    ],
)
def test_memory_of_transformer_engine_s_deterministic_backward_pass(lengths: list[int], config: dict[str, int], expected: int) -> None:
    assert te_backward_bytes(lengths, SimpleNamespace(**config)) == expected
