"""Cluster files, checked without a cloud account: node types, versions, prices."""
