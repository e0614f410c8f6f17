"""What every package uses: errors, frozen values, text from outside, files, settings and the lookup of names."""
