"""The planner: plans to begin at, their figures, the bound, and the search."""
