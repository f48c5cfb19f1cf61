"""Benchmarks: each runs as `python -m benchmarks.NAME`, prints tables, and is also a test at a tiny size.

workloads -> what is drawn: items and their costs, from a seed or from a trace
traces    -> length traces in files, so that every draw can be rerun elsewhere
plan      -> how near the bound, how many bytes, how fast: each method, and other packages
rules     -> which rank encodes what: the planner, and rules that open frameworks describe, written anew
reorder   -> metadata, plan, exchange and return timed apart on real processes, one rule beside the other
record    -> tables on the screen, JSON in a file, dated results with hardware and versions
"""
