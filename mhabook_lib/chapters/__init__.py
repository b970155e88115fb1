"""What each chapter claims: one TOML file a chapter."""
