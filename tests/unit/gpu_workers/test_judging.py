"""What a judge model may do to a report: grade, be refused, be slow or write nonsense; never fail it."""

import json
from collections.abc import Callable

import httpx
import pytest

from apps.contracts.evaluation import Grader, GraderKind
from apps.contracts.worker_api import JudgeAccess
from gpu_workers.train.after.judge import Judge, Question

ACCESS = JudgeAccess(url="http://gateway/v1", key="ann_web_x", model="demo")
GRADER = Grader(kind=GraderKind.JUDGE, model="demo", instructions="Is it polite?")
QUESTIONS = [Question(question=f"q{index}", reference="red", answer="blue") for index in range(6)]


def grade_of(content: str) -> httpx.Response:
    usage = {"prompt_tokens": 20, "completion_tokens": 3}
    return httpx.Response(200, json={"choices": [{"message": {"content": content}}], "usage": usage})


def judge(answer: Callable[[httpx.Request], httpx.Response], **options: object) -> Judge:
    given = {"seconds": 60.0, "transport": httpx.MockTransport(answer), "sleep": lambda _: None} | options
    return Judge(GRADER, ACCESS, **given)


def test_scores_come_back_in_order_with_what_they_were_billed_for():
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer ann_web_x"
        body = json.loads(request.content)
        bodies.append(body)
        number = int(json.loads(body["messages"][1]["content"])["question"][1:])
        return grade_of(str(1 + number % 5))

    found = judge(answer).judge(QUESTIONS)

    assert found.scores == [0.0, 0.25, 0.5, 0.75, 1.0, 0.0]
    assert (found.calls, found.input_tokens, found.output_tokens, found.trouble) == (6, 120, 18, "")
    assert all(body["model"] == "demo" and "Is it polite?" in body["messages"][0]["content"] for body in bodies)
    assert all(body["temperature"] == 0 and body["max_tokens"] <= 64 for body in bodies)


@pytest.mark.parametrize("content", ["no json", "9", '"5"', "[]", "true", "5.0", '{"score": 5}'])
def test_an_answer_that_is_no_grade_is_no_score(content):
    found = judge(lambda _: grade_of(content)).judge(QUESTIONS[:2])

    assert (found.scores, found.calls) == ([None, None], 2)


def test_a_refusal_ends_the_asking_and_is_told():
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        error = {"message": "You have no credit left.", "code": "insufficient_quota"}
        return httpx.Response(429, json={"error": error})

    found = judge(answer).judge(QUESTIONS * 20)

    assert set(found.scores) == {None} and len(asked) <= 2  # one in each lane
    assert found.trouble == "it was refused with 429 (You have no credit left)"


def test_a_busy_engine_is_asked_again_and_for_so_long_only():
    answers = iter([httpx.Response(503, headers={"retry-after": "1"}), grade_of("5")])
    assert judge(lambda _: next(answers)).judge(QUESTIONS[:1]).scores == [1.0]

    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no")

    found = judge(unreachable).judge(QUESTIONS)
    assert set(found.scores) == {None} and "could not be reached" in found.trouble


def test_a_limit_of_the_gateway_is_waited_for_while_there_is_time():
    limited = httpx.Response(429, json={"error": {"code": "rate_limit_exceeded", "message": "2 in progress."}})
    answers = iter([*[limited] * 9, grade_of("5")])

    assert judge(lambda _: next(answers)).judge(QUESTIONS[:1]).scores == [1.0]


def test_time_and_a_key_that_was_refused_are_reasons_too():
    assert judge(lambda _: grade_of("5"), seconds=0.0).judge(QUESTIONS).trouble == "its time was over"

    found = Judge(GRADER, None, seconds=60.0, refusal="Who created the job has left.").judge(QUESTIONS)
    assert (found.scores, found.trouble) == ([None] * 6, "Who created the job has left.")
