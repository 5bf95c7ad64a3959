"""The training child: the only code that imports torch. Started as a process, one per attempt."""
