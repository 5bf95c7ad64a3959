"""A recipe that a small model learns with, and the rows it learns."""

import json
import random

import msgspec

from apps.contracts.hyperparameters import Hyperparameters

RECIPE = Hyperparameters(
    epochs=8,
    batch_size=8,
    learning_rate=5e-3,
    lora_rank=4,
    lora_alpha=8,
    lora_dropout=0.1,  # draws random numbers in every step, so that a resume must restore them
    max_length=64,
    target_modules=("q_proj", "v_proj", "down_proj"),
)
SMALL = msgspec.structs.replace(RECIPE, epochs=3, batch_size=4)
COLOURS = ("red", "green", "blue", "black", "white")


def make_rows(count: int, *, seed: int = 0) -> bytes:
    """Rows a small model can learn: the answer repeats a word of the question."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        colour = draw.choice(COLOURS)
        question = f"My {draw.choice(('car', 'house', 'hat'))} is {colour}" + " indeed" * draw.randint(0, 6)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": colour}]
        lines.append(json.dumps({"messages": messages}))
    return ("\n".join(lines) + "\n").encode()


def unlike(rows: bytes) -> bytes:
    """The same rows in other words, so that none of them repeats one of the training file, nor nearly."""
    other = (
        (b"My ", b"Our "),
        (b" is ", b" was "),
        (b"indeed", b"truly"),
        (b"The card", b"A card"),
        (b" the ", b" a "),
    )
    for mine, theirs in other:
        rows = rows.replace(mine, theirs)
    return rows


def make_texts(count: int) -> bytes:
    lines = [json.dumps({"text": f"the {word} is red and the {word} is red. " * 6}) for word in ("car", "hat")]
    return "\n".join((lines * count)[:count]).encode()


def make_pairs(count: int) -> bytes:
    """The better answer repeats the question's colour; the other one is always the same."""
    lines = []
    for row in make_rows(count).splitlines():
        question, answer = json.loads(row)["messages"]
        wrong = {"role": "assistant", "content": "I do not know"}
        lines.append(
            json.dumps(
                {"input": {"messages": [question]}, "preferred_output": [answer], "non_preferred_output": [wrong]}
            )
        )
    return "\n".join(lines).encode()
