"""The loop of gather, decide and apply, and the channel to the workers."""
