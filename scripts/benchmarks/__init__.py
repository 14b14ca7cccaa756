"""What `benchmark.py` measures: peers in their own processes, this machine's floors, cost curves; and the reports."""
