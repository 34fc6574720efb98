"""What can go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langbot_plugin.api.entities.builtin.runner.errors import (
    AgentAPIError,
    AgentAPIException,
)

if TYPE_CHECKING:
    from stockade_runner.models import Gap


class ProcessError(AgentAPIException):
    """A call that was refused or failed.

    ``code`` is one of the broker's (``invalid``, ``denied``, ``not_found``, ``conflict``,
    ``fenced``, ``cancelling``, ``exhausted``, ``unavailable``, ``indeterminate``, …) or of
    the SDK's (``deadline_exceeded``, ``runtime_error``, ``host.action_error``, …).
    """

    def __init__(self, error: AgentAPIError):
        super().__init__(error)

    @classmethod
    def make(cls, code: str, message: str, **details: Any) -> ProcessError:
        return cls(AgentAPIError(code=code, message=message, details=details))

    @property
    def code(self) -> str:
        return self.error.code

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later. It was already repeated for a while."""
        return self.error.retryable or self.error.code in ("unavailable", "exhausted")

    @property
    def details(self) -> dict[str, Any]:
        return self.error.details


class OutputLost(ProcessError):
    """Output that was not read in time is no longer kept. ``gap`` says exactly which."""

    def __init__(self, gap: Gap):
        super().__init__(
            AgentAPIError(
                code="output_lost",
                message=f"{gap.bytes} bytes of output are no longer kept",
                details=gap.model_dump(by_alias=True),
            )
        )
        self.gap = gap
