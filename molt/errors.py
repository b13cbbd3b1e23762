"""Every error that Molt raises on purpose, as one tree.

MoltError                     (pickles; carries the message, EngineError also the tokens that a call had sampled)
 |- SettingError              a setting, flag, prompt file or agent file is wrong: the user mends it and runs again (exit 2)
 |- DataError                 a row, line or file does not hold what it must
 |   `- CorruptLogError       a committed row or file of the log fails its digest or cannot be read
 |- LogError                  the log cannot take or give rows
 |   |- LeaseHeldError        another writer holds the run
 |   |- FencedError           this writer was replaced; it must stop
 |   |- ConflictingAppendError  another payload under a known (producer, seq)
 |   `- LogFullError          no space, quota or permission to write
 |- LineageError              a token without lineage would reach the gradient
 |- EngineError               an engine failed, or disagrees about weights
 |   `- RefitError            new weights did not arrive as sent; the old version keeps serving
 |- AgentError                user code of an agent failed
 |   `- AgentTimeoutError     user code of an agent overran its time
 |- NonFiniteError            a loss, gradient or log-prob is not finite; the step is refused
 |- ReplayMismatchError       replay differs from the record; names step, segment and token
 `- StalledError              a wait reached its limit; names what was waited for
"""

from __future__ import annotations


class MoltError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class SettingError(MoltError, ValueError):
    """A setting is wrong: the text names setting, value, reason and the way out."""

    exit_code = 2


class DataError(MoltError, ValueError):
    """A row, line or file does not hold what it must; the text names file and line."""

    exit_code = 2


class CorruptLogError(DataError):
    """A committed row or file of the log fails its digest or cannot be read."""


class PromptTooLongError(DataError):
    """A prompt leaves no room to sample below data.max_len; another try would end the same way."""


class LogError(MoltError):
    """The log cannot take or give rows."""


class LeaseHeldError(LogError):
    """Another live writer holds the run."""


class FencedError(LogError):
    """This writer was replaced by a newer epoch and must stop."""


class ConflictingAppendError(LogError):
    """Another payload arrived under a (producer, seq) that is already committed."""


class LogFullError(LogError):
    """No space, quota or permission to write; nothing half-written is visible."""


class LineageError(MoltError):
    """A token without full lineage would reach the gradient."""


class EngineError(MoltError):
    """A rollout engine failed, or disagrees with the trainer about weights."""

    n_sampled: int = 0
    """Tokens of a call that failed, as far as its engine's process had got them."""


class RefitError(EngineError):
    """New weights did not arrive as sent; the old version keeps serving."""


class AgentError(MoltError):
    """User code of an agent failed; the rollout is failed, never rewarded with 0."""


class AgentTimeoutError(AgentError):
    """User code of an agent overran its time."""


class NonFiniteError(MoltError):
    """A loss, gradient or log-prob is not finite; the step is refused."""


class ReplayMismatchError(MoltError):
    """Replay differs from the record."""


class StalledError(MoltError):
    """A wait reached its limit."""

    exit_code = 3
