"""What router, simulator and planner obey alike: batching, routing, the cost of serving."""
