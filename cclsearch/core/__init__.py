"""Used by every package: errors, frozen values, untrusted text, files, settings and the lookup of names."""
