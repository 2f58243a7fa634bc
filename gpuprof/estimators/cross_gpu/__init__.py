"""Times of ops on GPUs of which nothing was measured, learned on others as ratios to what physics allows."""
