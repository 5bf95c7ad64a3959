"""The GPUs of this machine, and the run that has each."""

from collections.abc import Sequence


class Devices:
    """Gives each run as many GPUs as its job was quoted. A machine without GPUs has one device: its processor."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are the values for CUDA_VISIBLE_DEVICES of a child."""
        self.names = tuple(names)
        self._taken: set[str] = set()

    @property
    def free(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self._taken)

    def take(self, count: int) -> tuple[str, ...]:
        """Return GPUs that no other run has. Raises ValueError if fewer are free."""
        chosen = self.free[:count]
        if len(chosen) < count:
            raise ValueError(f"The run needs {count} GPUs and {len(chosen)} are free.")
        self._taken.update(chosen)
        return chosen

    def give_back(self, names: Sequence[str]) -> None:
        self._taken.difference_update(names)
