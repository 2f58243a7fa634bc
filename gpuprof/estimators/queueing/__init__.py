"""From the time of a batch to the time of a request: batch building and waiting."""
