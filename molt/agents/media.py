"""Images of a segment as the log keeps them: encoded bytes and processor tensors, each payload once, named where its tokens stand."""

from __future__ import annotations

from collections.abc import Sequence

from molt.agents.segments import SegmentDraft
from molt.log.rows import Medium, Payload


def segment_media(draft: SegmentDraft) -> list[Medium] | None:
    """What the segment names, in the order of its tokens; None without images. LineageError where an image is not whole."""
    media = []
    for placed in draft.images:
        expansion = placed.expansion
        placed.check_whole(draft.token_ids)
        media += [
            Medium(name=part.name, payload_digest=part.payload_digest, position=placed.position, len=len(expansion.token_ids))
            for part in expansion.parts
        ]
    return media or None


def media_payloads(drafts: Sequence[SegmentDraft]) -> list[Payload]:
    """The payloads that the segments of a rollout name, each once."""
    parts = (part for draft in drafts for placed in draft.images for part in placed.expansion.parts)
    return list({part.payload_digest: part.payload for part in parts}.values())
