"""The state of every random generator that training uses, in the form that transformers stores and restores."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from transformers.trainer_pt_utils import safe_globals

from gpu_workers.train.loop.process_group import is_distributed

_OTHERS = "others"  # the states of all processes but the first, in order

State = Mapping[str, Any]


def read_state() -> dict[str, Any]:
    """Return this process's state, including that of its GPU if it has one."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_state(state: State) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def gather_states() -> Sequence[State]:
    """Return the states of all processes on the first one; every process must call this."""
    state = read_state()
    if not is_distributed():
        return [state]
    is_first = torch.distributed.get_rank() == 0
    states: list[Any] = [None] * torch.distributed.get_world_size() if is_first else []
    torch.distributed.gather_object(state, states if is_first else None)
    return states


def save_states(states: Sequence[State], file: Path) -> None:
    first, *others = states
    torch.save({**first, _OTHERS: others}, file)


def load_state(file: Path, *, process: int) -> State:
    """Return the state of a process. If there were fewer processes, return that of the first one."""
    with safe_globals():
        first = torch.load(file, map_location="cpu", weights_only=True)
    states = [first, *first.pop(_OTHERS, [])]
    return states[process if process < len(states) else 0]
