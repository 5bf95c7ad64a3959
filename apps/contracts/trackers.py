"""External trackers on which a customer follows a run."""

from apps.contracts.struct import Struct


class Tracker(Struct, frozen=True, kw_only=True):
    """An external tracker on which the customer follows the run, with the customer's account and key.

    `project` is W&B's project or MLflow's experiment, `name` the run's name there; `url` is MLflow's server.
    """

    kind: str  # "wandb" | "mlflow"
    project: str
    name: str = ""
    entity: str | None = None
    tags: tuple[str, ...] = ()
    url: str = ""
    secret: str | None = None  # stays in the agent and the reporting process; never written to a file
