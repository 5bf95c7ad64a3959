"""What torch's caching allocator reserves when row lengths vary: `python -m tests.bench.estimates.allocator`.

Replays the large allocations of training steps (one row each, checkpointed, stock loss) against the allocator's rules:
best fit among free blocks, blocks of more than 1 MiB split, neighbours merged within a segment only, new segments of a
whole number of 2 MiB, all free segments returned when the card is full. Lengths are log-normal with mean 3,234 and
deviation 2,547, longer ones left out. Prints what was reserved over what was alive at most; the median is
`memory._VARIED_RESERVE_SHARE` + 1.
"""

import math
import random
import sys
from statistics import median

import msgspec

MIB = 1024**2
_STEPS = 60
_MEAN, _DEVIATION, _SHORTEST = 3234, 2547, 91
_CASES = ((4096, 11008, 32, 151936), (4096, 11008, 32, 64000))  # hidden, intermediate, layers, vocabulary
_CAPS = (512, 1024, 2048, 4096, 8192)


class Block:
    __slots__ = ("following", "is_free", "preceding", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_free = True
        self.preceding: Block | None = None
        self.following: Block | None = None


class Allocator:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.free = capacity, set[Block]()
        self.reserved = self.most_reserved = self.alive = self.most_alive = 0

    def take(self, wanted: int) -> Block:
        size = -(-wanted // 512) * 512
        block = min((b for b in self.free if b.size >= size), key=lambda b: b.size, default=None) or self._grow(size)
        self.free.discard(block)
        if block.size - size > MIB:
            rest = Block(block.size - size)
            rest.preceding, rest.following = block, block.following
            if rest.following:
                rest.following.preceding = rest
            block.following, block.size = rest, size
            self.free.add(rest)
        block.is_free = False
        self.alive += block.size
        self.most_alive = max(self.most_alive, self.alive)
        return block

    def give(self, block: Block) -> None:
        self.alive -= block.size
        block.is_free = True
        if block.preceding and block.preceding.is_free:
            block = self._merge(block.preceding, block)
        if block.following and block.following.is_free:
            block = self._merge(block, block.following)
        self.free.add(block)

    def _merge(self, left: Block, right: Block) -> Block:
        self.free -= {left, right}
        left.size += right.size
        left.following = right.following
        if right.following:
            right.following.preceding = left
        return left

    def _grow(self, size: int) -> Block:
        segment = -(-size // (2 * MIB)) * 2 * MIB if size >= 10 * MIB else 20 * MIB
        if self.reserved + segment > self.capacity:
            for whole in [b for b in self.free if b.preceding is None and b.following is None]:
                self.free.discard(whole)
                self.reserved -= whole.size
        self.reserved += segment
        self.most_reserved = max(self.most_reserved, self.reserved)
        return Block(segment)


def step(a: Allocator, tokens: int, hidden: int, ff: int, layers: int, vocabulary: int) -> None:
    """Allocations of one training step, in order."""
    widths = [4 * hidden, *[2 * hidden] * 3, 6 * hidden, 4 * hidden, *[2 * ff] * 4]
    kept = [a.take(tokens * hidden * 2)]
    for _ in range(layers):
        working = [a.take(tokens * width) for width in widths]
        kept.append(a.take(tokens * hidden * 2))
        for block in working:
            a.give(block)
    logits = tokens * vocabulary
    half, shifted, full, log_softmax = (a.take(logits * width) for width in (2, 2, 4, 4))
    a.give(full)
    converted = a.take(logits * 4)
    for block in (half, converted):
        a.give(block)
    first, second = a.take(logits * 4), a.take(logits * 4)
    for block in (log_softmax, first):
        a.give(block)
    narrow = a.take(logits * 2)
    for block in (second, shifted):
        a.give(block)
    last = a.take(logits * 2)
    a.give(narrow)
    gradient = a.take(tokens * hidden * 2)
    a.give(last)
    for _ in range(layers):
        working = [a.take(tokens * width) for width in (*widths, *[2 * ff] * 3)]
        following = a.take(tokens * hidden * 2)
        for block in (*working, gradient, kept.pop()):
            a.give(block)
        gradient = following
    a.give(gradient)
    a.give(kept.pop())


def ratio(cap: int, shape: tuple[int, int, int, int], seed: int = 1) -> float:
    """Reserved over alive after so many rows no longer than `cap`."""
    rng, variance = random.Random(seed), math.log(1 + (_DEVIATION / _MEAN) ** 2)
    allocator, done = Allocator(64 * 1024 * MIB), 0
    while done < _STEPS:
        length = int(rng.lognormvariate(math.log(_MEAN) - variance / 2, math.sqrt(variance)))
        if _SHORTEST <= length <= cap:
            step(allocator, length, *shape)
            done += 1
    return allocator.most_reserved / allocator.most_alive


def main() -> None:
    found = {f"vocabulary {shape[3]}, cap {cap}": round(ratio(cap, shape), 2) for shape in _CASES for cap in _CAPS}
    for name, value in found.items():
        sys.stdout.write(f"{name:32} {value:5.2f}\n")
    result = {"median": median(found.values()), "least": min(found.values()), "most": max(found.values())}
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
