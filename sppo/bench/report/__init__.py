"""Reports of measured rates: tables, plots and a hardware description."""
