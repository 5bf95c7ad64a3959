"""All states that a page may show, with the word, tone and icon of each."""

from typing import NamedTuple

from apps.core.messages.translation import later


class StatusLabel(NamedTuple):
    """The display of a state: word, badge tone, icon. `live` replaces the icon with a pulsing dot."""

    label: str
    tone: str = ""
    icon: str = ""
    live: bool = False


# Of any object, in the words of docs/CONTEXT.md.
STATUSES: dict[str, StatusLabel] = {
    "validating_files": StatusLabel(later("Checking data"), "info", live=True),
    "validating": StatusLabel(later("Checking data"), "info", live=True),
    "uploading": StatusLabel(later("Uploading"), "info", live=True),
    "queued": StatusLabel(later("Queued"), "", "clock"),
    "leased": StatusLabel(later("Starting"), "info", live=True),
    "running": StatusLabel(later("Training"), "info", live=True),
    "pausing": StatusLabel(later("Pausing"), "warn", "pause"),
    "paused": StatusLabel(later("Paused"), "warn", "pause"),
    "succeeded": StatusLabel(later("Succeeded"), "ok", "check"),
    "failed": StatusLabel(later("Failed"), "bad", "circle-alert"),
    "cancelled": StatusLabel(later("Cancelled"), "line", "ban"),
    "in_progress": StatusLabel(later("In progress"), "info", live=True),
    "finalizing": StatusLabel(later("Writing files"), "info", live=True),
    "cancelling": StatusLabel(later("Cancelling"), "warn", "ban"),
    "completed": StatusLabel(later("Completed"), "ok", "check"),
    "lost": StatusLabel(later("Lost contact"), "warn", "unplug"),
    "ready": StatusLabel(later("Ready"), "ok", "check"),
    "checking": StatusLabel(later("Verifying"), "info", live=True),
    "uncertified": StatusLabel(later("Not certified"), "", "circle-alert"),
    "refused": StatusLabel(later("Refused"), "bad", "circle-alert"),
    "no_certificate": StatusLabel(later("None"), "line", "circle-alert"),
    "files_only": StatusLabel(later("Files only"), "line", "download"),
    "uploaded": StatusLabel(later("Uploaded"), "", "clock"),
    "invalid": StatusLabel(later("Has errors"), "bad", "circle-alert"),
    "rejected": StatusLabel(later("Rejected"), "bad", "circle-alert"),
    "error": StatusLabel(later("Failed"), "bad", "circle-alert"),
    "deleting": StatusLabel(later("Deleting"), "warn", "trash-2"),
    "deleted": StatusLabel(later("Deleted"), "line", "trash-2"),
    "loading": StatusLabel(later("Loading"), "info", live=True),
    "loaded": StatusLabel(later("Warm"), "ok", "check"),
    "serving": StatusLabel(later("Serving"), "ok", "check"),
    "waiting": StatusLabel(later("Waiting to load"), "", "clock"),
    "cold": StatusLabel(later("Cold"), "", "power"),
    "off": StatusLabel(later("Not serving"), "line", "power"),
    "unloading": StatusLabel(later("Unloading"), "warn", "power"),
    "active": StatusLabel(later("Active"), "ok", "check"),
    "pending": StatusLabel(later("Pending"), "", "clock"),
    "delivered": StatusLabel(later("Delivered"), "ok", "check"),
    "disabled": StatusLabel(later("Disabled"), "bad", "ban"),
    "granted": StatusLabel(later("Granted"), "ok", "check"),
    "declined": StatusLabel(later("Declined"), "line", "ban"),
    "revoked": StatusLabel(later("Revoked"), "line", "ban"),
    "expired": StatusLabel(later("Expired"), "line", "clock"),
    "invited": StatusLabel(later("Invited"), "", "mail"),
    "requested": StatusLabel(later("Requested"), "", "clock"),
    "open": StatusLabel(later("Waiting for payment"), "", "clock"),
    "needs_response": StatusLabel(later("Needs a response"), "warn", "circle-alert"),
    "under_review": StatusLabel(later("Under review"), "", "clock"),
    "action_required": StatusLabel(later("To be confirmed"), "warn", "circle-alert"),
    "paid": StatusLabel(later("Paid"), "ok", "check"),
    "won": StatusLabel(later("Won"), "ok", "check"),
    "dispute_lost": StatusLabel(later("Lost"), "bad", "ban"),
    "suspended": StatusLabel(later("Suspended"), "bad", "ban"),
    "online": StatusLabel(later("Online"), "ok", "check"),
    "idle": StatusLabel(later("Idle"), "ok", "check"),
    "busy": StatusLabel(later("Busy"), "info", live=True),
    "cordoned": StatusLabel(later("Cordoned"), "warn", "ban"),
    "draining": StatusLabel(later("Draining"), "warn", "power"),
    "drained": StatusLabel(later("Drained"), "line", "power"),
    "offline": StatusLabel(later("Offline"), "bad", "unplug"),
    "admitted": StatusLabel(later("Admitted"), "", "plug"),
    "installed": StatusLabel(later("Installed"), "ok", "check"),
    "not_installed": StatusLabel(later("Not installed"), "line"),
}
