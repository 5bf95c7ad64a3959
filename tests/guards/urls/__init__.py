"""One line per address: who may use it, and what to try on it. A URL without a line, or a line without a URL, fails.

    page(get=P, post=P)   a page of an organization; the permission each method asks of the member's role
    person(get, post)     a page for anybody signed in
    api(GET=P, POST=P)    an endpoint for keys; the scope each method asks
    staff(get, post)      a page for operators
    public(reason)        open to everybody; says why
    signed(reason)        opened by something else than a session or a key; says what, and where that is tested

`ids` names the object each part of the address stands for (kinds in world.py), `data` is what a POST sends, `refs` the
members of it (or of the query) that name an object of the tenant: they too are tried with another tenant's ids.
`refuses` names roles that hold the permission and are refused all the same, each with the operation's rule.
"""

from tests.guards.urls.api import API
from tests.guards.urls.console import CONSOLE
from tests.guards.urls.pages import PAGES

URLS = PAGES | API | CONSOLE
