"""Running text is trained in pieces of the limit: its page, its quote and the trainer say the same."""

import json
import re

from django.urls import reverse

from apps.core.templatetags.ui import tokens
from apps.datasets.inspection.inspections import inspect_version
from apps.datasets.operations import count_tokens
from tests.factories.datasets import make_ready_version
from tests.factories.finetuning import TrainingSetup


def test_long_text_is_shown_whole_and_quoted_whole(organization, alice, client_for) -> None:
    floor = TrainingSetup(organization)
    texts = ["Where is my card? " * (200 if number == 3 else 3 + number) for number in range(12)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    version = make_ready_version(organization, content)
    count = count_tokens(version=version, base_model=floor.base_model)
    inspect_version(version=version)
    client = client_for(alice)

    page = client.get(reverse("web:dataset_detail", args=[version.pk]) + "?limit=256&line=4").content.decode()
    asked = {"dataset": version.pk, "model": floor.base_model.name, "max_length": "256", "epochs": "1"}
    method = client.get(reverse("web:job_new"), asked | {"step": "method"}).content.decode()

    assert "1 row over 256 tokens: trained in pieces, nothing is cut" in page
    assert (
        'class="beyond"' not in page
        and 'class="over"' not in page
        and "will be cut" not in page
        and ">cut<" not in page
    )
    pieces = re.search(r"in (\d+) pieces of the limit", page)
    assert pieces and int(pieces[1]) == -(-count.longest_row_tokens // 256)
    told = re.search(r"<dt>Tokens</dt><dd>([\d.,]+K?), ", method)
    assert told and told[1] == tokens(count.tokens)
