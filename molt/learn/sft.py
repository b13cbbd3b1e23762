"""Supervised steps: assistant turns of conversations, packed, one token-weighted loss over the whole optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from molt.admission.balance import balance
from molt.agents.render import ChatRenderer
from molt.agents.supervised import SupervisedRow, supervised_row
from molt.agents.tokenizer import Tokenizer
from molt.config import ActorSettings, FsdpSettings
from molt.errors import DataError
from molt.learn.alone import alone
from molt.learn.demonstrations import Conversation, read_conversations
from molt.learn.export import export
from molt.learn.model import load_model
from molt.learn.packing import pack
from molt.learn.policy import SENT_DTYPES, Policy
from molt.learn.weights import sent_tensors


def warm_up(
    model: str | Path,
    conversations: str | Path | Sequence[Conversation],
    *,
    num_steps: int,
    learning_rate: float,
    batch_size: int = 32,
    micro_batch_tokens: int = 8192,
    seed: int = 0,
    target: str | Path | None = None,
) -> list[float]:
    """Supervised steps in this process on a model folder, which is rewritten (or target is written). Returns the loss of each step.

    conversations: message lists, or a file whose rows have messages.
    """
    folder = Path(model)
    rows = tokenize(folder, conversations if not isinstance(conversations, str | Path) else read_conversations(str(conversations)))
    actor = ActorSettings(learning_rate=learning_rate, schedule="cosine", warmup_steps=min(10, num_steps // 10))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order, so that the same call gives the same weights
    try:
        with alone() as mesh:
            policy = Policy(load_model(str(folder), actor, FsdpSettings()), actor, FsdpSettings(), mesh=mesh, num_steps=num_steps)
            order = shuffled(len(rows), num_steps * batch_size, seed=seed)
            losses = [
                supervised_step(policy, [rows[i] for i in order[at : at + batch_size]], micro_batch_tokens=micro_batch_tokens)
                for at in range(0, num_steps * batch_size, batch_size)
            ]
            config = policy.scorer.lm.config.to_dict()
            export(sent_tensors(policy), config, source=folder, target=Path(target or folder), dtype=SENT_DTYPES[actor.dtype])
    finally:
        torch.set_num_threads(threads)
    return losses


def supervised_step(policy: Policy, rows: Sequence[SupervisedRow], *, micro_batch_tokens: int) -> float:
    """One update on the mean negative log-prob of all target tokens of the rows together. Returns that loss."""
    n_targets = sum(int(row.is_target_T.sum()) for row in rows)
    losses = []
    for places in balance([len(row.token_ids) for row in rows], num_ranks=1, micro_batch_tokens=micro_batch_tokens)[0]:
        logprobs, _ = policy(pack([rows[i].token_ids for i in places], [rows[i].is_target_T for i in places]))
        loss = -logprobs.sum() / n_targets
        loss.backward()
        losses.append(float(loss.detach()))
    policy.update()
    return math.fsum(losses)


def tokenize(model: Path, conversations: Sequence[Conversation], *, last_turn_only: bool = False) -> list[SupervisedRow]:
    """Conversations as ids with the assistant turns marked, through the model's own template."""
    renderer = ChatRenderer(Tokenizer.load(model))
    return [supervised_row(renderer, conversation, last_turn_only=last_turn_only) for conversation in conversations]


def shuffled(count: int, length: int, *, seed: int) -> list[int]:
    """Places of rows for all steps: pass after pass, each in its own seeded order."""
    if count == 0:
        raise DataError("no conversation to learn from; give at least one")
    generator = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < length:
        order += generator.permutation(count).tolist()
    return order[:length]
