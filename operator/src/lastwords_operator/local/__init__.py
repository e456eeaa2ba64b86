"""The one-machine side: workers as processes in place of pods."""
