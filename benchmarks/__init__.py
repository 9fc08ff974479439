"""Side-by-side measurements, run as `python -m benchmarks.NAME`."""

import os

# Read when torch is imported, which comes later. As in shards (actors/placement.py), so that an
# engine in process and a server are comparable.
os.environ.setdefault("GOMP_SPINCOUNT", "200000")
