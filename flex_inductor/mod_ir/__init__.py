"""The mods' own language: from a Python function to graphs and programs. It knows neither Inductor nor masks."""
