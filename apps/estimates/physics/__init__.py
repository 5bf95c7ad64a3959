"""Memory and time of one step from shapes, plans, stacks and data sheets."""
