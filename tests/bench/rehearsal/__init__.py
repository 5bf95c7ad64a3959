"""The memory rehearsal against real allocations, against full depth, and against the formula."""
