"""The training child, with nearly all code that imports torch. Started as a process, one per attempt."""
