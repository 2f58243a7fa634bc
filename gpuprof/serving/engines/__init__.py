"""Who keeps the machine processes: this machine itself, or Ray."""
