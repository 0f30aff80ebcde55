"""Other libraries' ways in. Each is a module to import, which needs that library."""
