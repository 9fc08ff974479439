"""Side-by-side measurements, run as `python -m benchmarks.NAME`."""

import os

# Read when torch is imported, which comes later. Without a bound, threads that wait for each other
# spin for milliseconds, and any other process on the machine makes a step many times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "200000")
