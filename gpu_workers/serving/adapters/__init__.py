"""The adapters of a replica: on its disk, in the host's memory, and loaded into the engine."""
