"""The FaultTolerantJob as users write it: spec, status, conditions."""
