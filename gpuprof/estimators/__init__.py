"""Predicts time, memory, compute requirement, interference and queueing of models on devices."""
