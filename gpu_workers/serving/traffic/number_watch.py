"""vLLM's own count of requests with NaN in their logits: the last guard against bad numbers in an engine."""

import asyncio
from collections.abc import Callable

from gpu_workers.engine.client import EngineClient, EngineDown, EngineRefused
from gpu_workers.engine.state import EngineState


class NumberWatch:
    """Calls `condemn(engine, culprit)` when the count has grown. For one event loop.

    The tester of an adapter holds `lock` meanwhile, so that bad numbers are attributed to that adapter.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        get_state: Callable[[], EngineState | None],
        condemn: Callable[[EngineState, str | None], None],
    ) -> None:
        self._engine = engine
        self._get_state = get_state
        self._condemn = condemn
        self._checked_activity = -1
        self.lock = asyncio.Lock()
        self.baseline = 0  # of this engine, when the session began
        self.total = 0  # seen by this agent, over all engines

    async def begin(self) -> None:
        """Take the engine's current count as the baseline. Raises EngineDown, EngineRefused."""
        self.baseline = await self._engine.count_corrupted_requests()

    async def check(self, activity: int) -> None:
        """Read the count, unless `activity` is unchanged since the last successful check."""
        if self._get_state() is None or activity == self._checked_activity:
            return
        async with self.lock:
            if await self.judge():
                self._checked_activity = activity

    async def judge(self, *, culprit: str | None = None) -> bool:
        """Condemn the engine if its count has grown. Returns False if the engine could not be asked."""
        state = self._get_state()
        if state is None:
            return False
        try:
            count = await self._engine.count_corrupted_requests()
        except (EngineDown, EngineRefused):
            return False
        if count > self.baseline and self._get_state() == state:
            self.total += count - self.baseline
            self._condemn(state, culprit)
        return True
