"""Write the OpenAPI document of the API to docs/openapi.json, from the types that serve its requests.

python -m scripts.with_services .venv/bin/python -m scripts.assets.openapi
"""

import sys

import django

from scripts.processes import REPOSITORY


def main() -> int:
    django.setup()
    from apps.interfaces.api.schema import published  # noqa: PLC0415 - needs the app registry

    (REPOSITORY / "docs/openapi.json").write_bytes(published())
    return 0


if __name__ == "__main__":
    sys.exit(main())
