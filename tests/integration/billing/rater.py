"""A rater as a process of its own, to be killed: charges what was recorded, again and again, until it is ended."""

import django

if __name__ == "__main__":
    django.setup()
    from apps.billing.usage.metering import rate_usage

    while True:
        rate_usage()
