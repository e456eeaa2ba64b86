"""The FaultTolerantJob as users write it: spec, status, conditions."""

from lastwords_operator.api.convert import to_core
from lastwords_operator.api.job import FaultTolerantJob
from lastwords_operator.api.load import JobFileError, load_job

__all__ = ["FaultTolerantJob", "JobFileError", "load_job", "to_core"]
