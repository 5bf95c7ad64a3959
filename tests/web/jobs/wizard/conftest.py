"""The wizard's pages as a member reads them."""

from urllib.parse import urlencode

import pytest

from tests.support.pages import text
from tests.web.pages import WIZARD_URL


@pytest.fixture
def page(client_for, bob):
    client = client_for(bob)

    def get(query: dict[str, str], *, status: int = 200, headers: dict[str, str] | None = None) -> str:
        answer = client.get(f"{WIZARD_URL}?{urlencode(query)}", headers=headers)
        assert answer.status_code == status
        return text(answer)

    return get
