"""Pictures of reports, for the documentation."""
