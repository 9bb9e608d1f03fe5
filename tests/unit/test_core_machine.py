"""Random lives of a cluster: invariants after every event, agents that are never fooled, replay that is identical."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from random_cluster import Cluster

TestCluster = Cluster.TestCase
TestCluster.settings = hypothesis_settings(max_examples=80, stateful_step_count=50)
