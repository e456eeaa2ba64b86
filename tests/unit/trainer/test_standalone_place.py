"""A script that runs alone has no agent that would read an object store for it."""

from __future__ import annotations

import pytest

from lastwords.trainer.collect import Collector
from lastwords.trainer.parts import Parts
from lastwords.trainer.standalone import Standalone


def test_an_object_store_is_refused_before_anything_is_trained() -> None:
    parts = Parts()
    with pytest.raises(ValueError, match="s3://bucket/x: a script that runs alone saves to a folder; start it by"):
        Standalone("s3://bucket/x", parts, Collector(parts))
