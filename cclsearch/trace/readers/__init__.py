"""One reader for each format: Kineto JSON, XLA (XSpace and JSON) and Nsight Systems SQLite."""
