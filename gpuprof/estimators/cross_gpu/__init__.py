"""Predicts times of ops on unmeasured GPUs, learned on other GPUs as ratios to physical bounds."""
