"""Images in the trainer: packed rows score as the model alone does, features come from the log, and a frozen tower does not move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from molt.agents.media import media_payloads, segment_media
from molt.agents.segments import SegmentDraft
from molt.config import ActorSettings, FsdpSettings
from molt.data.images import Image
from molt.data.processor import ImageProcessor, PlacedImage, named_tensors
from molt.data.tiny_vision import make_llava_model, make_vision_model
from molt.errors import LineageError
from molt.learn.journal import read_images, read_rows, row_images
from molt.learn.model import TokenValuer, load_model
from molt.learn.packing import Packed, RowImages, pack
from molt.learn.result import RefusalReason
from molt.learn.rows import Row, row_digest
from molt.learn.weights import sent_tensors
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import Payload, Span, TokenSource
from molt.log.writer import LogWriter
from molt.rollout import vision
from molt.rollout.vision import eyes
from molt.rollout.weights import tensor_shapes
from tests.groups import leave_group
from tests.learn.tiny import make_config, make_plan, make_rank, to_segments

SAMPLED = 6
TURNS = ((), (1,), (2, 3), (1,))
"""Pictures of each row, by the seed of their pixels."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random SmolVLM with weights large enough for its pictures to matter."""
    folder = tmp_path_factory.mktemp("seeing")
    make_vision_model(folder, num_tiles=2, spread=0.2)
    return folder


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaVA."""
    folder = tmp_path_factory.mktemp("llava")
    make_llava_model(folder, spread=0.2)
    return folder


def noise(seed: int) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 40, 3)).astype(np.uint8)
    return Image.of(PIL.Image.fromarray(pixels))


def make_image_rows(folder: Path, *, version: int = 0) -> tuple[list[Row], list[tuple[PlacedImage, ...]]]:
    """A row for each of TURNS: text with those pictures in it, then six sampled ids; and where the pictures stand."""
    processor = ImageProcessor.load(folder)
    assert processor is not None
    generator = np.random.default_rng(0)
    rows, places = [], []
    for number, seeds in enumerate(TURNS):
        sent = [80 + number, *(item for _ in seeds for item in (processor.placeholder_id, 90)), 81]
        prompt, placed = processor.expand(np.array(sent, np.int32), [noise(seed) for seed in seeds])
        sampled = generator.integers(10, 200, SAMPLED).astype(np.int32)
        length = len(prompt) + SAMPLED
        is_sampled = np.arange(length) >= len(prompt)
        rows.append(
            Row(
                segment_id=f"e0-p{number // 2}/{number % 2}/1/0",
                token_ids=np.concatenate([prompt, sampled]),
                is_sampled=is_sampled,
                is_trainable=is_sampled.copy(),
                behaviour_logprobs=np.where(is_sampled, -5.6, np.nan).astype(np.float32),
                policy_versions=np.where(is_sampled, version, -1).astype(np.int32),
                temperature=1.0,
                images=RowImages.of(placed, length),
            )
        )
        places.append(placed)
    return rows, places


def packed_of(rows: Sequence[Row]) -> Packed:
    return pack([r.token_ids for r in rows], [r.is_sampled for r in rows], None, None, [r.images for r in rows])


def test_features_stand_where_the_images_of_each_row_are(seeing: Path) -> None:
    rows, places = make_image_rows(seeing)
    packed = packed_of(rows)
    starts = np.cumsum([0, *(len(row.token_ids) for row in rows)])
    by_hand = [
        starts[number] + item.position + offset
        for number, placed in enumerate(places)
        for item in placed
        for offset in np.flatnonzero(item.expansion.is_feature)
    ]
    assert packed.feature_F is not None and packed.feature_F.tolist() == by_hand
    # four pictures of 2 x 2 tiles and the overview each, four features a tile; rows 1 and 3 show the same one, which is there once
    assert packed.image_tensors["pixel_values"].shape == (3 * 5, 3, 32, 32) and len(by_hand) == 4 * 5 * 4
    assert packed.source_F is not None and packed.source_F.tolist() == [*range(60), *range(20)]


@pytest.mark.parametrize("kind", ["seeing", "llava"])
def test_packed_rows_with_images_score_as_the_plain_model_alone(request: pytest.FixtureRequest, kind: str) -> None:
    from transformers import AutoModelForImageTextToText

    folder: Path = request.getfixturevalue(kind)
    rows, _ = make_image_rows(folder)
    scorer = load_model(str(folder), ActorSettings(), FsdpSettings())
    found, entropy = scorer(packed_of(rows), True)
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    has_prompt_axis = vision.FAMILIES[plain.config.model_type].has_prompt_axis
    expected, entropies = [], []
    for row in rows:
        tensors = named_tensors(row.images.tensors) if row.images is not None else {}
        given = {name: torch.tensor(tensor[None] if has_prompt_axis else tensor) for name, tensor in tensors.items()}
        logits = plain(input_ids=torch.tensor(row.token_ids[None].astype(np.int64)), **given).logits[0]
        logp = torch.log_softmax(logits.double(), -1)[-SAMPLED - 1 : -1]
        expected.append(logp[np.arange(SAMPLED), row.token_ids[-SAMPLED:]])
        entropies.append(-(logp.exp() * logp).sum(-1))
    assert torch.allclose(found.double(), torch.cat(expected), atol=1e-5)
    assert torch.allclose(entropy.double(), torch.cat(entropies), atol=1e-5)


def test_few_tiles_at_once_make_the_same_features(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = make_image_rows(seeing)
    scorer = load_model(str(seeing), ActorSettings(), FsdpSettings())
    tensors = packed_of(rows).image_tensors
    whole = vision.image_features(scorer.lm, tensors)
    monkeypatch.setattr(vision, "TILES_AT_ONCE", 4)
    assert whole.shape == (15 * 4, 64) and torch.allclose(vision.image_features(scorer.lm, tensors), whole, atol=1e-6)


def test_sampled_placeholder_is_a_token_and_no_image(seeing: Path) -> None:
    rows, _ = make_image_rows(seeing)
    processor = ImageProcessor.load(seeing)
    assert processor is not None
    ids = rows[1].token_ids.copy()
    ids[-2] = processor.placeholder_id
    found, _ = load_model(str(seeing), ActorSettings(), FsdpSettings())(packed_of([replace(rows[1], token_ids=ids)]))
    assert torch.isfinite(found).all() and len(found) == SAMPLED


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_sees_learns_only_where_it_is_told_to(seeing: Path, is_frozen: bool) -> None:
    rows, _ = make_image_rows(seeing)
    scorer = load_model(str(seeing), ActorSettings(freeze_vision=is_frozen), FsdpSettings())
    scorer(packed_of(rows))[0].sum().backward()
    seen = [p for module in eyes(scorer.lm) for p in module.parameters()]
    assert all((p.grad is None) == is_frozen for p in seen)
    inner = {id(p) for p in seen}
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in scorer.parameters() if id(p) not in inner)
    scorer.zero_grad()
    scorer(packed_of(rows[:1]))[0].sum().backward()  # a batch without an image: the tower takes part, with nothing to learn
    assert all(p.grad is None if is_frozen else float(p.grad.abs().sum()) == 0.0 for p in seen)


def test_recomputed_activations_give_the_same_gradient(seeing: Path) -> None:
    rows, _ = make_image_rows(seeing)
    grads = []
    for is_checkpointed in (False, True):
        scorer = load_model(str(seeing), ActorSettings(freeze_vision=False, gradient_checkpointing=is_checkpointed), FsdpSettings())
        scorer(packed_of(rows))[0].sum().backward()
        grads.append([p.grad.clone() for p in scorer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("kind", ["seeing", "llava"])
def test_step_with_images_trains_and_sends_every_tensor_of_the_checkpoint(request: pytest.FixtureRequest, kind: str) -> None:
    folder: Path = request.getfixturevalue(kind)
    rows, _ = make_image_rows(folder)
    config = make_config(folder, train={"micro_batch_tokens": 256}, data={"max_len": 256})
    worker = make_rank(config, rows)
    before = sent_tensors(worker.policy)
    result = worker.train(make_plan(rows, micro_batch_tokens=256))
    assert result.refused is None and result.grad_norm > 0
    after = sent_tensors(worker.policy)
    assert {name: tuple(tensor.shape) for name, tensor in after.items()} == tensor_shapes(str(folder))
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved and not any("vision" in name or "connector" in name or "projector" in name for name in moved)
    assert any("layers.1.mlp" in name for name in moved) and any("lm_head" in name for name in moved)


def test_row_whose_images_do_not_fit_its_tokens_is_refused(seeing: Path, model: Path) -> None:
    rows, _ = make_image_rows(seeing)
    images = rows[1].images
    assert images is not None
    rows[1] = replace(rows[1], images=replace(images, tensors=({name: tensor[:-1] for name, tensor in images.tensors[0].items()},)))
    config = make_config(seeing, train={"micro_batch_tokens": 256}, data={"max_len": 256})
    refusal = make_rank(config, rows).train(make_plan(rows, micro_batch_tokens=256)).refused
    assert refusal is not None and refusal.reason is RefusalReason.LINEAGE
    assert "20 image tokens, and the trainer makes 16 features of its 4 tiles" in refusal.error
    blind = load_model(str(model), ActorSettings(), FsdpSettings())
    with pytest.raises(LineageError, match="it has images, and the model takes none"):
        blind.check_images(images, "segment s")


def test_images_come_back_from_the_log_without_any_file(seeing: Path, tmp_path: Path) -> None:
    rows, places = make_image_rows(seeing)
    segments, payloads = [], []
    for row, placed, segment in zip(rows, places, to_segments(rows), strict=True):
        draft = SegmentDraft(opened_by="start", first_difference=None, token_ids=row.token_ids, images=placed)
        spans, begin = [], 0
        is_feature = row.images.is_feature if row.images is not None else np.zeros(len(row.token_ids), bool)
        for place in range(1, len(row.token_ids) + 1):
            if place == len(row.token_ids) or (is_feature[place], row.is_sampled[place]) != (is_feature[begin], row.is_sampled[begin]):
                spans.append(span_of(place - begin, is_feature=bool(is_feature[begin]), is_sampled=bool(row.is_sampled[begin])))
                begin = place
        segments.append(replace(segment, spans=spans, media=segment_media(draft)))
        payloads += media_payloads([draft])
    with LogWriter.open(tmp_path / "run", run="run", attempt=1, store="durable") as writer:
        Producer(writer, "test").append_sync(segments=segments, payloads=payloads)
        reader = LogReader.open(tmp_path / "run")
        back = read_rows(reader, [row.segment_id for row in rows])
        batch = reader.cut().segments([row.segment_id for row in rows])
        older = replace(batch, scalars=batch.scalars.drop_columns(["media"]))
        assert read_images(reader.cut(), older) == [None] * len(rows)  # a log from before there were images
        kinds = reader.cut().table("payloads", ["kind"])["kind"].to_pylist()
    # three pictures, their three tensors of pixels, and one mask that all of them share
    assert sorted(kinds) == ["image"] * 3 + ["tensor"] * 4
    for row, found in zip(rows, back, strict=True):
        assert (row.images is None) == (found.images is None)
        if row.images is not None and found.images is not None:
            assert np.array_equal(row.images.is_feature, found.images.is_feature) and row.images.digests == found.images.digests
            for a, b in zip(row.images.tensors, found.images.tensors, strict=True):
                assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
    assert torch.equal(packed_of(rows).image_tensors["pixel_values"], packed_of(back).image_tensors["pixel_values"])


def span_of(length: int, *, is_feature: bool, is_sampled: bool) -> Span:
    if is_sampled:
        return Span(len=length, source=TokenSource.POLICY, trainable=True, policy_version=0, kv_version=0)
    return Span(len=length, source=TokenSource.IMAGE if is_feature else TokenSource.USER)


def test_image_token_outside_every_image_is_refused() -> None:
    tensor = Payload.of_array("tensor", np.zeros((1, 2), np.float32))
    media = [{"name": "pixel_values", "payload_digest": tensor.payload_digest, "position": 0, "len": 2}]
    with pytest.raises(LineageError, match="3 image tokens, 2 of them inside the 1 images"):
        row_images(np.ones(3, bool), media, {tensor.payload_digest: tensor.to_array()})
    with pytest.raises(LineageError, match="2 image tokens, 0 of them inside the 0 images"):
        row_images(np.array([True, True, False]), [], {})
    assert row_images(np.zeros(3, bool), [], {}) is None


def test_critic_values_and_teacher_scores_see_the_images(seeing: Path) -> None:
    rows, _ = make_image_rows(seeing)
    valuer = TokenValuer(load_model(str(seeing), ActorSettings(), FsdpSettings()))
    torch.nn.init.ones_(valuer.value_head.weight)
    values = valuer(packed_of(rows))[0]
    assert rows[1].images is not None
    dark = replace(
        rows[1].images,
        digests=(("dark",),),
        tensors=tuple({n: np.ones_like(t) for n, t in found.items()} for found in rows[1].images.tensors),
    )
    others = valuer(packed_of([rows[0], replace(rows[1], images=dark), *rows[2:]]))[0]
    differs = (values - others).abs().view(len(rows), SAMPLED).amax(1)
    assert [bool(difference > 1e-4) for difference in differs] == [False, True, False, False]


def test_batch_digest_knows_which_images_were_shown(seeing: Path) -> None:
    rows, _ = make_image_rows(seeing)
    assert rows[1].images is not None
    other = replace(rows[1], images=replace(rows[1].images, digests=(("x", "y", "z"),)))
    assert row_digest(rows[1], np.zeros(SAMPLED)) != row_digest(other, np.zeros(SAMPLED))


def _process(rank: int, folder: str, model: str) -> None:
    """One of two ranks; only the second one's rows have images in the first micro-batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    found = [_train(Path(model), 2, is_frozen=is_frozen) for is_frozen in (False, True)]
    if rank == 0:
        torch.save(found, f"{folder}/found")
    leave_group()


def _train(model: Path, num_ranks: int, *, is_frozen: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    rows, _ = make_image_rows(model)
    actor = {"freeze_vision": is_frozen, "learning_rate": 1e-3}
    worker = make_rank(make_config(model, train={"micro_batch_tokens": 256}, data={"max_len": 256}, actor=actor), rows)
    losses = [worker.train(make_plan(rows, step=step, num_ranks=num_ranks, micro_batch_tokens=256)).loss for step in range(2)]
    return losses, worker.policy.full_tensors()


def test_two_ranks_of_which_one_may_see_nothing_equal_one(seeing: Path, tmp_path: Path) -> None:
    mp.spawn(_process, (str(tmp_path), str(seeing)), nprocs=2)
    two = torch.load(tmp_path / "found", weights_only=False)
    for is_frozen, (losses_two, weights_two) in zip((False, True), two, strict=True):
        losses_one, weights_one = _train(seeing, 1, is_frozen=is_frozen)
        assert np.allclose(losses_one, losses_two, atol=1e-5)
        differ = sum(int((weights_one[name] - weights_two[name]).abs().gt(1e-4).sum()) for name in weights_one)
        assert differ < 0.01 * sum(tensor.numel() for tensor in weights_one.values())
