"""The finished adapter under its public name: served, asked and scored."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import openai
from openai.types.fine_tuning import FineTuningJob

from demo.main_job.answers import ModelMembers, ServingState
from demo.main_job.platform import DemoFailed, Platform, extra, found, is_passing
from demo.main_job.stages import GIVE_UP_SECONDS, POLL_SECONDS, Quiet, Stage
from demo.main_job.training_file import read_rows

ANSWER_TOKENS = 24  # the longest label has fewer
SCORE_SEED = 7
LANES = 16


def serve(platform: Platform, stage: Stage, job: FineTuningJob) -> str | None:
    """Return the adapter's name once it answers; None if it was deleted or refused and must be trained again."""
    model, started = str(job.fine_tuned_model), time.monotonic()
    quiet = Quiet()
    quiet.see(model)
    while not _answers(platform, model):
        listed = found(lambda: platform.openai.models.retrieve(model))
        if listed is None:
            stage.line("serve", f"The adapter {model} was deleted. A new job makes another one.")
            return None
        members = extra(listed, ModelMembers)
        if members.status == "refused":
            stage.line("serve", f"The adapter {model} was refused: {members.status_reason} A new job starts.")
            return None
        serving = platform.get(f"/models/{model}/serving", ServingState)
        if serving.state == "off":
            stage.line("serve", f"The adapter {model} was not served. It is now.")
            platform.post(f"/models/{model}/serving", {"is_served": True}, ServingState)
        if quiet.is_too_long:
            text = f"The adapter {model} did not answer within {quiet.seconds:.0f} s: {_why_it_is_silent(serving)}"
            raise DemoFailed(text, process="vllm")
        if quiet.is_hint_due:
            logs = f"Logs: {platform.log('vllm')} and {platform.log('serving-agent')}"
            stage.line("serve", f"{_why_it_is_silent(serving)} {logs}")
        time.sleep(POLL_SECONDS)
    stage.line("serve", f"{model} answers, after {time.monotonic() - started:.1f} s")
    return model


def _why_it_is_silent(serving: ServingState) -> str:
    match serving.state:
        case "waiting" | "loading" | "cold" | "off":
            return "The engine (the process vllm) is still loading the base model or the adapter."
        case "warm":
            return "The engine holds the adapter and does not answer yet."
        case state:
            return f"The adapter is {state}: {serving.reason}"


def _answers(platform: Platform, model: str) -> bool:
    try:
        _ask_once(platform.openai.with_options(max_retries=0), model, "Is this on?")
    except openai.NotFoundError:
        return False
    except openai.APIError as error:
        if not is_passing(error):
            raise
        return False
    return True


def score(platform: Platform, stage: Stage, model: str, rows: int) -> float:
    """Return the share of held-out messages whose greedy answer is exactly the label."""
    sample = random.Random(SCORE_SEED).sample(read_rows("test.csv"), rows)
    started, right = time.monotonic(), 0
    with ThreadPoolExecutor(LANES) as lanes:
        answers = lanes.map(lambda row: ask(platform, model, row[0]) == row[1], sample)
        for number, is_right in enumerate(answers, start=1):
            right += is_right
            stage.bar(number / rows, f"{model}: {right}/{number}")
    accuracy = right / rows
    spent = time.monotonic() - started
    stage.line("score", f"{accuracy:6.1%} of {rows:,} held-out messages by {model} in {spent:.0f} s")
    return round(accuracy, 4)


def show_answers(platform: Platform, stage: Stage, model: str) -> None:
    for text, label in random.Random(SCORE_SEED + 1).sample(read_rows("test.csv"), 3):
        base = " ".join(ask(platform, platform.account["base_model"], text).split())
        stage.line("compare", f"{text.strip()!r}")
        stage.line("", f"expected {label} | adapter {ask(platform, model, text)} | base {base[:40]!r}")


def ask(platform: Platform, model: str, text: str) -> str:
    """Return the greedy answer. Wait for an engine that restarts."""
    give_up_at = time.monotonic() + GIVE_UP_SECONDS
    while True:
        try:
            return _ask_once(platform.openai, model, text)
        except openai.APIError as error:
            if not is_passing(error) or time.monotonic() > give_up_at:
                raise


def _ask_once(client: openai.OpenAI, model: str, text: str) -> str:
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=ANSWER_TOKENS
    )
    return (reply.choices[0].message.content or "").strip()
