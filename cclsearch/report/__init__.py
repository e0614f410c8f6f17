"""What people see: terminal tables, charts, one HTML page."""
