"""The Python API: the names that `import cclsearch` offers, over the engine's functions (`docs/python-api.md`)."""
