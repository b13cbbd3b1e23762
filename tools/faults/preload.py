"""What the fork server imports once, so that the life of a victim costs milliseconds: everything used, nothing opened."""

from __future__ import annotations

import molt.log.fsck
import molt.log.producer
import molt.log.reader
import molt.log.writer
from molt import schema

schema.tables()
schema.event_kinds()

LOADED = (molt.log.fsck, molt.log.producer, molt.log.reader, molt.log.writer)
"""Modules that are warm."""
