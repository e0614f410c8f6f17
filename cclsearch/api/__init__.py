"""The Python API: what `import cclsearch` offers, over the engine's functions (`docs/python-api.md`)."""
