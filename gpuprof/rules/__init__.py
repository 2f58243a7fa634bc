"""Rules common to the router, the simulator and the planner: batching, routing, the cost of serving."""
