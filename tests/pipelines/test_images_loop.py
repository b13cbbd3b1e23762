"""Images end to end on real Ray, log, FSDP2 and engines: two turns with a picture each; the log alone is enough to train the same again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelines.conftest import LIMIT_S, ROOT, World, environment

pytestmark = [pytest.mark.slow, pytest.mark.ray]

AGENT = Path(__file__).with_name("looking_agent.py")


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny model that takes images, and pictures of shapes."""
    path = tmp_path_factory.mktemp("seeing")
    made = """
import sys
from pathlib import Path
from molt.data.tiny_vision import make_pictures, make_vision_model
world = Path(sys.argv[1])
make_vision_model(world / "model", num_tiles=2, spread=0.1)
make_pictures(world / "shapes", num_prompts=16)
"""
    subprocess.run([sys.executable, "-c", made, str(path)], env=environment(), check=True, timeout=LIMIT_S, capture_output=True)
    return World(path=path, runs=path / "runs")


def train(world: World, name: str, **changes: object) -> None:
    """Three steps of two groups of four, two turns each."""
    own = {
        "data__prompt_dataset": world.path / "shapes" / "prompts.jsonl",
        "data__max_len": 256,
        "train__agent_path": AGENT,
        "train__num_steps": 3,
        "train__batch_size": 8,
        "rollout__batch_size": 2,
        "rollout__max_new_tokens": 6,
    }
    world.train(name, **(own | changes))


def check(world: World, name: str) -> None:
    """What every run with images leaves behind."""
    world.audit(name)
    shown = world.sql(
        name,
        """
        select segment_id, stop_reason, len(list_filter(media, lambda m: m.name = 'image')) as num_images,
               list_distinct(list_transform(media, lambda m: m.len)) as lengths,
               list_sum(list_transform(list_filter(spans, lambda s: s.source = 'image'), lambda s: s.len)) as num_features
        from segments
        """,
    )
    # A square picture is 2 x 2 tiles and the overview, four features each; a rollout ends early where the policy wrote a placeholder.
    assert len(shown) >= 24 and all(row["num_features"] == 20 * row["num_images"] and len(row["lengths"]) == 1 for row in shown)
    assert sum(row["num_images"] == 2 for row in shown) >= 12
    (kinds,) = world.sql(name, "select count(*) as n, count(distinct payload_digest) as num_names from payloads")
    assert kinds["n"] == kinds["num_names"]  # members and turns share what they show


def replays(world: World, name: str) -> None:
    """Replay from the log alone, the pictures gone."""
    pictures, kept = world.path / "shapes", world.path / "gone"
    shutil.move(pictures, kept)
    try:
        done = world.molt("replay", world.run(name), "--json")
    finally:
        shutil.move(kept, pictures)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert (report["is_equal"], report["num_compared"]) == (True, 3)


def test_pictures_train_audit_and_replay_without_their_files(seeing: World) -> None:
    train(seeing, "shapes")
    check(seeing, "shapes")
    norms = seeing.sql("shapes", "select grad_norm from step_trained order by step")
    assert len(norms) == 3 and all(row["grad_norm"] > 0 for row in norms)
    caches = seeing.sql("shapes", "select distinct caches from weights_refit")
    assert caches == [{"caches": ["images", "kv"]}]
    replays(seeing, "shapes")


def test_tower_that_learns_is_trained_on_two_ranks_and_served_anew(seeing: World) -> None:
    train(seeing, "tower", actor__freeze_vision="false", fsdp__num_ranks=2, actor__gradient_checkpointing="true")
    check(seeing, "tower")
    replays(seeing, "tower")
    exported = seeing.run("tower") / "checkpoints" / "final"
    assert (exported / "processor_config.json").is_file()
    program = """
import sys, torch
from transformers import AutoModelForImageTextToText
before, after = (AutoModelForImageTextToText.from_pretrained(folder).state_dict() for folder in sys.argv[1:])
moved = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])}
print(sorted(moved))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(seeing.path / "model"), str(exported)],
        env=environment(), capture_output=True, text=True, check=True, timeout=LIMIT_S, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "['connector', 'text_model', 'vision_model', 'weight']"


def test_policy_learns_what_only_the_picture_tells(seeing: World) -> None:
    """Half of the pictures are red, half blue, and the question is always the same: without eyes one answer in two is right."""
    folder = seeing.path / "colours"
    made = """
import json, sys
from pathlib import Path
import PIL.Image
from molt.data.tiny_vision import make_vision_model
folder = Path(sys.argv[1])
make_vision_model(folder / "model", num_tiles=1, spread=0.1)
rows = []
for number in range(32):
    shade = 100 + 5 * number
    PIL.Image.new("RGB", (32, 32), (shade, 20, 20) if number % 2 else (20, 20, shade)).save(folder / f"{number}.png")
    content = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "?"}]
    rows.append({"messages": [{"role": "user", "content": content}], "label": str(number % 2)})
(folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""
    subprocess.run([sys.executable, "-c", made, str(folder)], env=environment(), check=True, timeout=LIMIT_S, capture_output=True)
    off = {"algo__advantage__is_correction_level": "off", "algo__advantage__is_correction_mode": "mask", "train__async_queue_size": 0}
    own = {"actor__model_name_or_path": folder / "model", "actor__learning_rate": 3e-3, "data__prompt_dataset": folder / "prompts.jsonl"}
    sizes = {"data__max_len": 64, "train__micro_batch_tokens": 1024, "train__batch_size": 64, "rollout__batch_size": 8}
    sizes |= {"rollout__n_samples_per_prompt": 8, "rollout__max_new_tokens": 1, "train__num_steps": 30, "train__num_epochs": 8}
    agent = {"train__agent_path": AGENT.with_name("colour_agent.py")}
    seeing.train("colours", **off, **own, **sizes, **agent)
    rewards = [row["reward_mean"] for row in seeing.sql("colours", "select reward_mean from step_trained order by step")]
    assert sum(rewards[:3]) / 3 < 0.65 and sum(rewards[-5:]) / 5 > 0.85, rewards


@pytest.mark.vllm
def test_pictures_on_vllm_agree_with_the_trainer_after_every_refit(seeing: World) -> None:
    off = {"algo__advantage__is_correction_level": "off", "algo__advantage__is_correction_mode": "mask", "train__async_queue_size": 0}
    train(seeing, "vllm", vllm__engine="vllm", actor__freeze_vision="false", **off)
    check(seeing, "vllm")
    replays(seeing, "vllm")
    gaps = seeing.sql(
        "vllm",
        """
        with sampled as (
            select s.step, unnest(s.trainer_logprobs) as trainer,
                   unnest(list_filter(g.behaviour_logprobs, lambda x: x is not null)) as engine
            from scores s join segments g using (segment_id)
        )
        select step, avg(abs(trainer - engine)) as gap, max(abs(trainer - engine)) as largest, count(*) as n
        from sampled group by step order by step
        """,
    )
    assert [row["step"] for row in gaps] == [0, 1, 2]
    assert all(row["gap"] < 1e-3 and row["n"] >= 48 for row in gaps)
    assert seeing.sql("vllm", "select distinct caches from weights_refit where step >= 0") == [{"caches": ["images", "kv"]}]
