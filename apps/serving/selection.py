"""Which of a base model's deployments a replica holds, when it cannot hold all of them.

The adapters used last, in turns between the organizations: each one's latest before anybody's second, so that nobody
loses an adapter in use to somebody who made many. What is left out is cold; a request for it makes it the latest.
"""

from collections import Counter
from collections.abc import Iterable

from apps.serving.models import Deployment


def choose(deployments: Iterable[Deployment], *, capacity: int, max_rank: int) -> list[Deployment]:
    """Return at most `capacity` of one base model's deployments, their versions selected along."""
    fitting = [deployment for deployment in deployments if deployment.adapter_version.rank <= max_rank]
    turns: Counter[str] = Counter()
    in_turn: list[tuple[int, int, Deployment]] = []
    for place, deployment in enumerate(sorted(fitting, key=_last_use, reverse=True)):
        turns[deployment.organization_id] += 1
        in_turn.append((turns[deployment.organization_id], place, deployment))
    return [deployment for _, _, deployment in sorted(in_turn, key=lambda entry: entry[:2])[:capacity]]


def _last_use(deployment: Deployment) -> tuple[float, str]:
    moment = max(filter(None, (deployment.created_at, deployment.last_requested_at)))
    return moment.timestamp(), deployment.pk
