from apps.accounts.models import Organization
from tests.factories.accounts import make_organization


def test_two_organizations_of_one_name_get_two_slugs(organization: Organization) -> None:
    twin = make_organization("Acme")

    assert organization.slug == "acme"
    assert twin.slug.startswith("acme-")
