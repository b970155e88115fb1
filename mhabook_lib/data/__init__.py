"""Small tables that the chapters read."""
