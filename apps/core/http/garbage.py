"""Python's collector of garbage in a process that answers requests."""

import gc

# Ten to thirty times Python's: a request leaves thousands of objects behind, and hardly any of them in cycles.
_THRESHOLDS = 20_000, 20, 20


def spare_lasting_objects() -> None:
    """Leave out of every collection what is loaded by now, and collect less often.

    Call it when a process has imported what it needs. A full collection over Django and all models takes a tenth of a
    second, in which every thread waits.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
