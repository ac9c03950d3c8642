"""One version of a policy's weights, as both sides of the tape name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A version of one policy, and the digest of its weights. Versions are ordered by (run epoch, number).

    >>> PolicyVersion("actor", 2, 7, "sha256:…").key
    (2, 7)
    """

    policy_id: str
    run_epoch: int
    version: int
    weights_digest: str

    @property
    def key(self) -> tuple[int, int]:
        """What orders versions of one policy."""
        return (self.run_epoch, self.version)

    @property
    def fields(self) -> dict[str, Any]:
        """The columns that every weights event carries."""
        return {
            "policy_id": self.policy_id,
            "policy_run_epoch": self.run_epoch,
            "version": self.version,
            "weights_digest": self.weights_digest,
        }
