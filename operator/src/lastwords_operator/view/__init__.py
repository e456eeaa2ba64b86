"""What `lastwords run` and `lastwords status` show."""
