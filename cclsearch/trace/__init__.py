"""The trace toolkit: any profiler trace to one event table, to metrics, to the reason."""
