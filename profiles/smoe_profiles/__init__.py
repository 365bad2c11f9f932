"""Models, traces and tables: everything in smoe that knows files and model formats."""
