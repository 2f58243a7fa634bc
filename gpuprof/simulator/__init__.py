"""What if: replays arrivals against a deployment map, without a device."""
