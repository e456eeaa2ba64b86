"""What to do. Pure: standard library and lastwords.protocol only, no clock, randomness, environment or input/output."""
