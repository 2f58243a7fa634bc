"""Types without I/O: devices, shares, models, estimates, demands, fleets, deployment maps."""
