"""Starts, watches and restarts the rank processes of one worker. Standard library only; runs in the user's image."""
