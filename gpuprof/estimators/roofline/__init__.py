"""The roofline model: times of unmeasured ops from FLOPs and bytes."""
