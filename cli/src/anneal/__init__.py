"""The `anneal` command: files, jobs, models and chat of an Anneal installation, over its public API.

It imports the server's own row checks and estimates as `apps`. The wheel holds copies of those modules
(`cli/wheel.py`), so a file is judged here as it is judged there.
"""

__version__ = "0.1.0"
