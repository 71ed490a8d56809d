"""Where output bytes go and how they get there: layout, staging, checksums, publish, verify, save."""
