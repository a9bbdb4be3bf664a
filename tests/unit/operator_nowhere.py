"""A desk of operators that nobody sits at."""

from __future__ import annotations

from gpuledger.adapters.http.operator_ports import Answer, Document, Residing, Revision, Trial
from gpuledger.domain.messages import Operation


class Nowhere:
    """Everything is empty, and nothing is done."""

    async def status(self) -> Document:
        return {}

    async def alerts(self) -> Document:
        return {}

    async def queue(self) -> Document:
        return {}

    def nodes(self) -> Document:
        return {}

    def policy(self) -> Document:
        return {}

    async def plans(self, limit: int) -> Answer:
        return {}

    async def operations(self, limit: int) -> Answer:
        return {}

    def try_plan(self, trial: Trial) -> Answer:
        return {}

    async def revise_policy(self, revision: Revision) -> Answer:
        return {}

    async def set_residency(self, residing: Residing) -> Answer:
        return {}

    async def carry_out(self, operation: Operation) -> Answer:
        return {}
