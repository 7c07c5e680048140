"""Run and comparison directories -> tables, plots and one self-contained HTML page."""
