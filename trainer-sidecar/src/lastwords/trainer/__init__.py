"""The part of Lastwords inside the training process. Needs torch and numpy."""
