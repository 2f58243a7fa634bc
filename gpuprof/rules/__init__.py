"""Rules that the router, the simulator and the planner share: batching, routing, the cost of serving."""
