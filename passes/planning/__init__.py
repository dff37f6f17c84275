"""The planner: candidate plans, their frontier over time and memory, and the search among them."""
