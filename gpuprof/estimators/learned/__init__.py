"""Regressors: features, training, storage, evaluation."""
