"""The web application of `ccl-search ui`: the runs of a project in a browser, on this machine only."""
