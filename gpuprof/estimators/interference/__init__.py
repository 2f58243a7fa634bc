"""What neighbours cost one another."""
