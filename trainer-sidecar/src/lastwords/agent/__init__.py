"""The sidecar of one worker: keeps, moves and persists the state of its ranks. Never imports torch."""
