"""Pinned corpus sources: the packages, their licences, and how much of each is kept."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One upstream package that contributes text."""

    name: str
    version: str
    licence: str
    parser: str
    max_bytes: int
    registry: str = "pypi"


MB = 1_000_000

SOURCES: tuple[Source, ...] = (
    Source("chitchat-dataset", "0.9.0", "MIT", "chitchat", 7 * MB),
    Source("wordnet-base", "1:3.0-37", "WordNet-3.0", "wordnet", 3 * MB, "debian"),
    Source("dict-jargon", "4.4.7-3.1", "public domain", "jargon", 700_000, "debian"),
    Source("chatterbot-corpus", "1.3.3", "BSD-3-Clause", "chatterbot", MB),
    Source("home-assistant-intents", "2026.10.27", "Apache-2.0", "home_assistant", MB // 2),
    Source("ovos-skill-personal", "0.1.19", "Apache-2.0", "ovos", MB // 2),
    Source("ovos-skill-alerts", "0.1.28", "BSD-3-Clause", "ovos", MB // 2),
    Source("ovos-skill-weather", "1.0.6", "Apache-2.0", "ovos", MB // 8),
    Source("ovos-skill-date-time", "1.1.5", "Apache-2.0", "ovos", MB // 25),
    Source("ovos-skill-volume", "0.1.16", "Apache-2.0", "ovos", MB // 2),
    Source("ovos-skill-naptime", "0.3.15", "Apache-2.0", "ovos", MB // 2),
    Source("ovos-skill-camera", "1.0.4", "Apache-2.0", "ovos", MB // 2),
    Source("ovos-skill-count", "0.0.2", "Apache-2.0", "ovos", MB // 25),
    Source("ovos-skill-news", "0.4.6", "Apache-2.0", "ovos", MB // 2),
    Source("ovos-skill-randomness", "1.1.0", "MIT", "ovos", MB // 2),
    Source("ovos-skill-wallpapers", "1.0.9", "Apache-2.0", "ovos", MB // 2),
    Source("ovos-skill-wikipedia", "0.8.13", "Apache-2.0", "ovos", MB // 2),
    Source("stripe", "16.1.0", "MIT", "python", 900_000),
    Source("lithic", "0.133.0", "Apache-2.0", "python", MB),
    Source("increase", "0.552.0", "Apache-2.0", "python", MB),
    Source("modern-treasury", "1.80.0", "MIT", "python", MB),
    Source("squareup", "46.0.0.20260916", "MIT", "python", MB),
    Source("wise-sdk", "0.1.1", "MIT", "python", MB),
    Source("plaid-python", "46.0.0", "MIT", "python", MB // 4),
    Source("orb-billing", "4.90.0", "Apache-2.0", "python", MB // 2),
    Source("gocardless-pro", "3.22.0", "MIT", "python", MB // 2),
    Source("braintree", "4.48.0", "MIT", "python", MB // 2),
    Source("checkout-sdk", "4.8.1", "MIT", "python", MB // 2),
    Source("razorpay", "2.0.1", "MIT", "python", MB // 2),
    Source("mollie-api-python", "4.0.0", "BSD-3-Clause", "python", MB // 2),
    Source("lago-python-client", "1.55.0", "MIT", "python", MB // 2),
    Source("coinbase-advanced-py", "1.8.4", "Apache-2.0", "python", MB // 2),
    Source("azure-mgmt-billing", "8.0.0", "MIT", "python", MB // 5),
    Source("azure-mgmt-web", "11.0.1", "MIT", "python", MB // 5),
    Source("twilio", "9.13.0", "MIT", "python", MB // 4),
    Source("slack-sdk", "3.47.0", "MIT", "python", MB // 3),
    Source("discord.py", "2.7.1", "MIT", "python", MB // 5),
    Source("boxsdk", "10.18.0", "Apache-2.0", "python", MB // 2),
    Source("klaviyo-api", "25.0.0", "MIT", "python", MB // 5),
    Source("shippo", "3.9.0", "MIT", "python", MB // 3),
    Source("openai", "3.54.0", "Apache-2.0", "python", MB // 4),
    Source("anthropic", "2.12.0", "Apache-2.0", "python", MB // 5),
    Source("google-cloud-dialogflow-cx", "2.9.0", "Apache-2.0", "python", MB // 5),
    Source("google-ads", "34.0.0", "Apache-2.0", "python", MB // 4),
    Source("kubernetes", "37.0.2", "Apache-2.0", "python", MB // 5),
    Source("django", "5.2.8", "BSD-3-Clause", "python", MB // 5),
    Source("pandas", "3.1.1", "BSD-3-Clause", "python", MB // 5),
    Source("nltk", "3.10.4", "Apache-2.0", "python", MB // 5),
    Source("celery", "5.7.0", "BSD-3-Clause", "python", MB // 3),
    Source("networkx", "3.6.1", "BSD-3-Clause", "python", MB // 5),
    Source("textblob", "0.20.1", "MIT", "python", MB // 3),
    Source("botocore", "1.44.5", "Apache-2.0", "botocore", 2 * MB),
)


def fetch(source: Source, folder: Path) -> None:
    """Download one pinned source into the folder with its registry's ordinary client."""
    folder.mkdir(parents=True, exist_ok=True)
    if source.registry == "debian":
        subprocess.run(["apt-get", "download", f"{source.name}={source.version}"], cwd=folder, check=True)
        return
    spec = f"{source.name}=={source.version}"
    command = ["pip", "download", "--no-deps", "--prefer-binary", "-q", "-d", str(folder), spec]
    subprocess.run(command, check=True)


def locate(source: Source, folder: Path) -> Path:
    """Return the downloaded archive of a source."""
    stem = source.name.replace("-", "_").replace(".", "_").lower()
    for path in sorted(folder.iterdir()):
        if path.name.lower().replace("-", "_").replace(".", "_").startswith(f"{stem}_"):
            return path
    raise FileNotFoundError(f"{source.name} is not in {folder}")
